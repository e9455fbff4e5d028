"""The metrics table: one CSV row per round, for spreadsheets and plots."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

from esper.telemetry.event import Event, RoundCompleted
from esper.telemetry.sinks.jsonl import cut_torn_line
from esper.telemetry.span import PHASES

PLAIN_COLUMNS = tuple(field.name for field in dataclasses.fields(RoundCompleted) if field.name != "phase_seconds")
COLUMNS = PLAIN_COLUMNS + tuple(f"phase/{phase}" for phase in PHASES)


class MetricsCsvSink:
    """Appends one row per `RoundCompleted` to ``path``, flushed before the next event; the folder must exist.

    A phase that the round did not report is an empty cell.

    Raises:
        ValueError: ``path`` holds a table with other columns; or, from `handle`, a phase is not in ``PHASES`` of
            `esper.telemetry.span`.
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
        unknown = sorted(set(event.phase_seconds) - set(PHASES))
        if unknown:
            raise ValueError(f"unknown phases {', '.join(unknown)}; known: {', '.join(PHASES)}")
        plain = [getattr(event, name) for name in PLAIN_COLUMNS]
        self._write(plain + [event.phase_seconds.get(phase, "") for phase in PHASES])

    def close(self) -> None:
        self._file.close()

    def _write(self, row: list[object]) -> None:
        self._writer.writerow(row)
        self._file.flush()


def _first_row(path: Path) -> list[str] | None:
    """Returns the header of an existing table, or None if there is none yet."""
    if not path.exists():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), None)
