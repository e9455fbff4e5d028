"""What shows a run beside its folder: made from ``track.to`` of the config, each in the background."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from esper.config import ConfigError, TrainingConfig
from esper.experiment.folder import METRICS
from esper.experiment.report.read import read_metrics
from esper.telemetry.hub import Sink
from esper.telemetry.sinks.background import BackgroundSink
from esper.telemetry.sinks.tensorboard import TensorBoardSink
from esper.telemetry.sinks.tracker import TrackerSink

TENSORBOARD = "tensorboard"
"""Also the name of its folder in the run folder."""


def check_trackers(config: TrainingConfig) -> None:
    """Raises ConfigError where a tracker is not installed, with what installs it; nothing is imported."""
    missing = [name for name in config.track.to if not _is_there(name)]
    if missing:
        raise ConfigError(
            f"track.to names {', '.join(missing)}, which cannot be imported here: pip install {' '.join(missing)}"
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # it is imported already, and was made by hand
        return True


def tracking_sinks(config: TrainingConfig, folder: Path, resumed: bool) -> list[Sink]:
    """A sink for each name in ``track.to``; of a run that is resumed, after its logs were cut to the checkpoint."""
    track = config.track
    steps = _steps_done(folder / METRICS) if track.to and resumed else 0
    sinks: list[Sink] = []
    for name in track.to:
        inner: TensorBoardSink | TrackerSink
        if name == TENSORBOARD:
            inner = TensorBoardSink(folder / TENSORBOARD, steps, resumed, config.to_toml())
        else:
            inner = TrackerSink(name, folder, track.project, config.model_dump(mode="json"), steps)
        sinks.append(BackgroundSink(inner, track.queue, track.patience, inner.wants))
    return sinks


def _steps_done(metrics: Path) -> int:
    """Epochs of all hosts in the rounds that are done. Raises ConfigError where they are not to be found."""
    try:
        return sum(done.epochs for done in read_metrics(metrics))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{metrics} cannot be read ({error}), and says where curves go on; empty track.to in config.toml to go on "
            f"without them"
        ) from None
