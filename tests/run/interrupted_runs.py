"""Runs that end by a Ctrl-C."""

from __future__ import annotations

from pathlib import Path

from esper.config import TrainingConfig
from esper.run.experiment import Experiment
from esper.run.telemetry import RunSummary
from tests.run.run_helpers import (
    Does,
)


def interrupted(config: TrainingConfig, folder: Path, sink: Does) -> RunSummary | None:
    """The run until its Ctrl-C; None when that came before there was anything to sum up."""
    try:
        summary = Experiment(config, folder, [sink]).run()
    except KeyboardInterrupt:
        summary = None
    assert sink.did
    assert summary is None or summary.interrupted
    return summary
