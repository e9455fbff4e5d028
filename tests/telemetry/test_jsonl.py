"""The event log: every event is a line, whole on disk before the next."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from esper.telemetry.event import Event
from esper.telemetry.record import record
from esper.telemetry.sinks.jsonl import JsonlSink
from tests.telemetry.sample_events import completed, cut, read_events


def test_jsonl_reads_back_what_was_written(tmp_path: Path) -> None:
    events: list[Event] = [
        cut(0),
        completed(1, mean_return=math.nan),
        cut(2, slot="two\nlines \u00e9"),
    ]
    sink = JsonlSink(tmp_path / "events.jsonl")
    for event in events:
        sink.handle(event)
    sink.close()
    assert list(read_events(tmp_path / "events.jsonl")) == [
        record(event) for event in events
    ]
    assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == 3


def test_jsonl_cuts_a_torn_line_before_it_appends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.handle(cut(0))
    sink.handle(cut(1))
    sink.close()
    path.write_bytes(path.read_bytes()[:-20])  # the crash
    with caplog.at_level(logging.WARNING):
        sink = JsonlSink(path)
    sink.handle(cut(2))
    sink.close()
    assert [fields["epoch"] for fields in read_events(path)] == [0, 2]
    assert "removed an incomplete last line" in caplog.text


def test_jsonl_writes_nothing_of_an_event_that_json_cannot_hold(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    with pytest.raises(TypeError):
        sink.handle(cut(0, slot=object()))  # type: ignore[arg-type]
    sink.close()
    assert (tmp_path / "events.jsonl").read_bytes() == b""
