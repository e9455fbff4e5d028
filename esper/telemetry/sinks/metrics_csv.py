"""The metrics table: one CSV row per round, for spreadsheets and plots."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

from esper.telemetry.event import Event, RoundCompleted
from esper.telemetry.memory import MEMORY, by_kind
from esper.telemetry.sink import FileSink
from esper.telemetry.span import PHASES

TABLES = {"phase": "phase_seconds", "memory": "memory"}
"""Fields that have a column for each of their entries, by the prefix of these columns."""
PLAIN_COLUMNS = tuple(field.name for field in dataclasses.fields(RoundCompleted) if field.name not in TABLES.values())
COLUMNS = (
    *PLAIN_COLUMNS,
    *(f"phase/{phase}" for phase in PHASES),
    *(f"memory/{kind}" for kind in MEMORY),
)


class MetricsCsvSink(FileSink):
    """Appends one row per `RoundCompleted` to ``path``.

    A phase that the round did not report is an empty cell, and so is a kind of memory. Bytes of one kind are added up
    over GPUs and other places; events have them apart.

    Raises:
        ValueError: ``path`` holds a table with other columns; or, from `handle`, a phase that is not in ``PHASES`` of
            `esper.telemetry.span`, or a kind of memory that is not in ``MEMORY`` of `esper.telemetry.memory`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        # The file is open for appending, so that its position is at the end.
        self._file.seek(0)
        header = next(csv.reader(self._file), None)
        if header is not None and header != list(COLUMNS):
            self.close()
            raise ValueError(
                f"{self.path} has different columns than this version of Esper writes; move it away, or log elsewhere"
            )
        self._writer = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
        if header is None:
            self._writer.writeheader()

    def handle(self, event: Event) -> None:
        if not isinstance(event, RoundCompleted):
            return
        row = {name: getattr(event, name) for name in PLAIN_COLUMNS}
        if math.isnan(event.baseline_accuracy):  # it was not measured
            del row["baseline_accuracy"]
        for phase, seconds in event.phase_seconds.items():
            row[f"phase/{phase}"] = seconds
        for kind, held in by_kind(event.memory).items():
            row[f"memory/{kind}"] = held
        unknown = sorted(row.keys() - set(COLUMNS))
        if unknown:
            raise ValueError(f"unknown columns {', '.join(unknown)}; known: {', '.join(COLUMNS)}")
        self._writer.writerow(row)
