"""The telemetry that cases share."""

from __future__ import annotations

import pytest

from esper.bench.fixtures import full_telemetry
from tests.telemetry.sample_events import completed


def test_failed_telemetry_is_an_error() -> None:
    def measured() -> None:
        with full_telemetry() as hub:
            hub._active["JsonlSink"].close()
            hub.emit(completed(1))

    with pytest.raises(RuntimeError, match="nothing was measured"):
        measured()
