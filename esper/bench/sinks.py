"""The telemetry of `esper run`, for cases that measure its cost."""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from esper.telemetry.event import Event
from esper.telemetry.hub import Sink, TelemetryHub
from esper.telemetry.sinks.console import ConsoleSink
from esper.telemetry.sinks.jsonl import JsonlSink
from esper.telemetry.sinks.metrics_csv import MetricsCsvSink


class TimedHub:
    """A hub that measures the time spent in its sinks."""

    def __init__(self, hub: TelemetryHub) -> None:
        self.hub = hub
        self.seconds = 0.0
        self.events = 0

    def emit(self, event: Event) -> None:
        start = time.perf_counter()
        self.hub.emit(event)
        self.seconds += time.perf_counter() - start
        self.events += 1


@contextmanager
def full_telemetry() -> Iterator[TimedHub]:
    """Yields a hub with an event log and a metrics table in a temporary folder, and a console that writes to memory.

    Raises:
        RuntimeError: a sink failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        sinks: list[Sink] = [
            JsonlSink(Path(folder) / "events.jsonl"),
            MetricsCsvSink(Path(folder) / "metrics.csv"),
            ConsoleSink(Console(file=io.StringIO(), width=160)),
        ]
        with TelemetryHub(sinks) as hub:
            yield TimedHub(hub)
            if hub.dropped:
                raise RuntimeError(f"sinks failed, so nothing was measured: {dict(hub.dropped)}")
