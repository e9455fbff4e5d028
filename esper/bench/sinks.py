"""The telemetry of `esper run`, for cases that measure its cost."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from esper.files.run_folder import RunFolder
from esper.telemetry.hub import TelemetryHub
from esper.telemetry.sinks.console import ConsoleSink


@contextmanager
def full_telemetry() -> Iterator[TelemetryHub]:
    """Yields a hub with the sinks of a run in a temporary folder, and a console that writes to memory.

    Raises:
        RuntimeError: a sink failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        console = ConsoleSink(Console(file=io.StringIO(), width=160))
        with TelemetryHub([*RunFolder(Path(folder), resumed=False).sinks(), console]) as hub:
            yield hub
            if hub.dropped:
                raise RuntimeError(f"sinks failed, so nothing was measured: {dict(hub.dropped)}")
