"""The metrics table: one CSV row per round, for spreadsheets and plots."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Set
from pathlib import Path

from esper.telemetry.event import Event, RoundCompleted
from esper.telemetry.memory import MEMORY, by_kind
from esper.telemetry.sinks.jsonl import cut_torn_line
from esper.telemetry.span import PHASES

TABLES = ("phase_seconds", "memory")
"""Fields that have a column for each of their entries."""
PLAIN_COLUMNS = tuple(field.name for field in dataclasses.fields(RoundCompleted) if field.name not in TABLES)
COLUMNS = (*PLAIN_COLUMNS, *(f"phase/{phase}" for phase in PHASES), *(f"memory/{kind}" for kind in MEMORY))


class MetricsCsvSink:
    """Appends one row per `RoundCompleted` to ``path``, flushed before the next event; the folder must exist.

    A phase that the round did not report is an empty cell, and so is a kind of memory. Bytes of one kind are added up
    over GPUs and other places; events have them apart.

    Raises:
        ValueError: ``path`` holds a table with other columns; or, from `handle`, a phase that is not in ``PHASES`` of
            `esper.telemetry.span`, or a kind of memory that is not in ``MEMORY`` of `esper.telemetry.memory`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        cut_torn_line(self.path)
        header = _first_row(self.path)
        if header is not None and header != list(COLUMNS):
            raise ValueError(
                f"{self.path} has different columns than this version of Esper writes; move it away, or log elsewhere"
            )
        self._file = self.path.open("a", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if header is None:
            self._write(list(COLUMNS))

    def handle(self, event: Event) -> None:
        if not isinstance(event, RoundCompleted):
            return
        memory = by_kind(event.memory)
        _check("phases", set(event.phase_seconds), PHASES)
        _check("kinds of memory", set(memory), MEMORY)
        plain = [getattr(event, name) for name in PLAIN_COLUMNS]
        phases = [event.phase_seconds.get(phase, "") for phase in PHASES]
        self._write([*plain, *phases, *(memory.get(kind, "") for kind in MEMORY)])

    def close(self) -> None:
        self._file.close()

    def _write(self, row: list[object]) -> None:
        self._writer.writerow(row)
        self._file.flush()


def _check(what: str, given: Set[str], known: Iterable[str]) -> None:
    """Raises ValueError listing the known names for a name that has no column."""
    unknown = sorted(given - set(known))
    if unknown:
        raise ValueError(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")


def _first_row(path: Path) -> list[str] | None:
    """Returns the header of an existing table, or None if there is none yet."""
    if not path.exists():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), None)
