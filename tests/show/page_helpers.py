"""A parser that reads a page as a browser does, and hostile events."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from base64 import b64decode
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from esper.show.page import report_html
from esper.show.read import open_runs
from esper.show.view import RunView
from esper.telemetry.event import EpochCompleted, Event
from esper.telemetry.sinks.jsonl import JsonlSink

VOID = {"meta", "br", "hr", "img", "input", "link"}
NASTY = "<script>window.hacked=1</script>\"'&</style><img src=x onerror=window.hacked=1>ü😀\x1b[2J\u202e\x00\ud800"
"""Markup, quotes, an escape sequence, a change of direction, and half a surrogate pair."""


class Page(HTMLParser):
    """Checks that every element is closed, and keeps names, ids, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> where {self.open[-1]} is open"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


@cache
def html_of(*folders: Path) -> str:
    """The page of folders that no test changes after this."""
    return report_html(open_runs(folders))


def viewed(*events: Event) -> RunView:
    """The view of a run with these events."""
    view = RunView()
    for event in events:
        view.handle(event)
    return view


def drawings(html: str) -> list[ElementTree.Element]:
    """All pictures; each must be XML by itself."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    return [ElementTree.fromstring(b64decode(picture)) for picture in found]


def nasty(fields: dict[str, Any]) -> dict[str, Any]:
    """The event with every name that comes from outside replaced."""
    return {
        name: value if name == "event" else _nasty(name, value)
        for name, value in fields.items()
    }


def _nasty(name: str, value: Any) -> Any:
    if name == "comparisons":  # dataclasses: their keys are no names
        return [
            {key: _nasty(key, item) for key, item in comparison.items()}
            for comparison in value
        ]
    if isinstance(value, dict):
        if name == "stages":
            return {NASTY + key: stage for key, stage in value.items()}
        return {NASTY + key: _nasty("", item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nasty("", item) for item in value]
    if isinstance(value, str) and name not in ("after", "before"):
        return NASTY + value
    return value


class Going(NamedTuple):
    """A run folder whose log is open, and the events that are still to be written."""

    folder: Path
    sink: JsonlSink
    rest: Iterator[Event]

    def end(self) -> None:
        for event in self.rest:
            self.sink.handle(event)
        self.sink.close()


def in_the_second_round(event: Event) -> bool:
    """Whether host 0 is at its second epoch of the second round; the other one is at its first."""
    second = isinstance(event, EpochCompleted) and event.episode == 1
    return second and (event.env, event.epoch) == (0, 2)
