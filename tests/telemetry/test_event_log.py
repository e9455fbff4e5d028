"""Event logs that grow, are torn, broken, cut back or missing."""

from __future__ import annotations

import json
from pathlib import Path

from esper.telemetry.event import SeedCut
from esper.telemetry.event_log import EventLog
from esper.telemetry.record import record
from esper.telemetry.sinks.jsonl import JsonlSink, being_written
from tests.telemetry.sample_events import cut


def epochs(log: EventLog) -> list[int]:
    events, _ = log.read()
    return [event.epoch for event in events if isinstance(event, SeedCut)]


def test_only_new_lines_are_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert log.read() == ([], False)
    sink = JsonlSink(log.path)
    sink.handle(cut(1))
    sink.handle(cut(2))
    assert epochs(log) == [1, 2]
    assert epochs(log) == []
    sink.handle(cut(3))
    assert epochs(log) == [3]
    assert log.problems() == []


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    JsonlSink(log.path).handle(cut(1))
    line = log.path.read_bytes()
    with log.path.open("ab") as file:
        file.write(line[:20])
    assert epochs(log) == [1]
    assert "the last line is incomplete" in log.problems()[0]
    with log.path.open("ab") as file:
        file.write(line[20:])
    assert epochs(log) == [1]
    assert log.problems() == []


def test_every_way_to_tear_the_last_line_is_noticed(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    whole, last = (json.dumps(record(cut(epoch))) for epoch in range(2))
    for length in range(1, len(last) + 1):
        log.path.write_text(f"{whole}\n{last[:length]}")
        assert epochs(EventLog(log.path)) == [0]
        log.read()
        assert "the last line is incomplete" in log.problems()[0]


def test_broken_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    JsonlSink(log.path).handle(cut(7))
    good = log.path.read_bytes()
    bad = [
        b"{",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"event": "SeedCut", "schema": 1}',
        b"",
        b"1" * 5000,
    ]
    log.path.write_bytes(good + b"".join(line + b"\n" for line in bad) + good)
    assert epochs(log) == [7, 7]
    (words,) = log.problems()
    assert "left out 7 lines that could not be read" in words
    assert "line 2:" in words


def test_a_log_that_was_cut_back_is_read_anew(tmp_path: Path) -> None:
    """A resumed run cuts its log; in the meantime, it may have grown longer again."""
    log = EventLog(tmp_path / "events.jsonl")
    sink = JsonlSink(log.path)
    for epoch in (1, 2, 3):
        sink.handle(cut(epoch))
    assert epochs(log) == [1, 2, 3]
    lines = log.path.read_bytes().splitlines(keepends=True)
    with log.path.open("rb+") as file:
        file.truncate(len(lines[0]))
    for epoch in (4, 5, 6, 7):
        sink.handle(cut(epoch))
    events, again = log.read()
    assert again
    assert [event.epoch for event in events if isinstance(event, SeedCut)] == [
        1,
        4,
        5,
        6,
        7,
    ]
    log.path.unlink()
    assert log.read() == ([], True)


def test_an_open_log_is_known_to_be_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert being_written(path) is None
    sink = JsonlSink(path)
    sink.handle(cut(1))
    assert being_written(path) is True
    sink.close()
    assert being_written(path) is False
