"""Two recorded runs to show; tests that change a folder copy it first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from esper.show.charts import Picture
from esper.telemetry.event import Event
from esper.telemetry.event_log import EventLog
from esper.telemetry.sinks.jsonl import JsonlSink
from tests.core_helpers import one_thread
from tests.recorded import Recorded
from tests.show.page_helpers import Going

__all__ = ["one_thread"]

Edit = Callable[[dict[str, Any]], dict[str, Any] | None]


@pytest.fixture(scope="session")
def learned(recorded: Recorded) -> Path:
    """An agent that learned for three rounds; finished."""
    return recorded.run


@pytest.fixture(scope="session")
def grown(recorded: Recorded) -> Path:
    """One round of a schedule that keeps a conv_light in r0c0 of both hosts."""
    return recorded.grown


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run folder, its events changed by a function that gives None for what is left out."""

    def make(folder: Path, edit: Edit | None = None, name: str = "copied") -> Path:
        there = tmp_path / name
        shutil.copytree(folder, there)
        if edit is not None:
            log = there / "events.jsonl"
            kept = []
            for line in log.read_text().splitlines():
                fields = edit(json.loads(line))
                if fields is not None:
                    kept.append(json.dumps(fields) + "\n")
            log.write_text("".join(kept))
        return there

    return make


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are made and not drawn, which takes most of the time of a page."""
    empty = Picture(b"<svg></svg>", "")
    for module in ("charts", "life"):
        monkeypatch.setattr(f"esper.show.{module}.picture", lambda *_: empty)


@pytest.fixture
def going(
    learned: Path, copy: Callable[..., Path]
) -> Iterator[Callable[[Event], Going]]:
    """The recorded run, going on after its first event that a function accepts."""
    with ExitStack() as stack:

        def make(last: Callable[[Event], bool]) -> Going:
            events, _ = EventLog(learned / "events.jsonl").read()
            folder = copy(learned, lambda _: None)
            sink = JsonlSink(folder / "events.jsonl")
            stack.callback(sink.close)
            rest = iter(events)
            for event in rest:
                sink.handle(event)
                if last(event):
                    break
            return Going(folder, sink, rest)

        yield make
