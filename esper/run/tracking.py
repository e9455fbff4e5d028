"""Experiment trackers named in ``track.to``."""

from __future__ import annotations

import csv
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

from esper.config import ConfigError, TrainingConfig
from esper.telemetry.hub import Sink
from esper.telemetry.sinks.trackers import ActiveRunSink, TensorBoardSink, active_run

TENSORBOARD = "tensorboard"
"""Name of the tracker, and of its folder in the run folder."""
MODULES = {TENSORBOARD: "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Python module of each tracker."""


def check_trackers(config: TrainingConfig) -> None:
    """Raises ConfigError if a tracker of the config is not installed (the message says how to install it), or if wandb
    or trackio has no active run. TensorBoard is imported, which loads torch."""
    check_libraries(config)
    if TENSORBOARD in config.track.to:
        try:
            importlib.import_module(MODULES[TENSORBOARD])
        except Exception as error:  # a broken installation may raise anything
            raise _not_installed({TENSORBOARD: str(error)}) from None


def check_libraries(config: TrainingConfig) -> None:
    """Does the same for wandb and trackio, of which nothing is imported: an active run has done that."""
    libraries = [name for name in config.track.to if name != TENSORBOARD]
    missing: dict[str, str] = {}
    for name in libraries:
        if sys.modules.get(name) is None and find_spec(name) is None:
            missing[name] = f"no module named {name}"
    if missing:
        raise _not_installed(missing)
    for name in libraries:
        if active_run(name) is None:
            raise ConfigError(
                f"track.to names {name}, and no run of {name} is active: call {name}.init() in a Python program that "
                "then starts this run, or use --track tensorboard"
            )


def _not_installed(missing: dict[str, str]) -> ConfigError:
    return ConfigError(
        f"track.to names {', '.join(missing)}, which cannot be imported ({'; '.join(missing.values())}); "
        f"to install: pip install {' '.join(missing)}"
    )


def tracking_sinks(config: TrainingConfig, folder: Path, resumed: bool) -> list[Sink]:
    """Returns a sink for each name in ``track.to``. On resuming, call it after the logs were cut to the checkpoint."""
    from esper.files.run_folder import METRICS  # loads torch

    track = config.track
    # Trackers count in epochs of all hosts, and go on after those of the run so far.
    steps = 0
    if track.to and resumed:
        steps = _steps_done(folder / METRICS)
    sinks: list[Sink] = []
    for name in track.to:
        if name == TENSORBOARD:
            sinks.append(TensorBoardSink(folder / TENSORBOARD, steps, resumed, config.to_toml()))
        else:
            sinks.append(ActiveRunSink(name, steps))
    return sinks


def _steps_done(metrics: Path) -> int:
    """Returns the epochs of all hosts in complete rounds. Raises ConfigError if ``metrics`` cannot be read."""
    try:
        with metrics.open(encoding="utf-8", newline="") as file:
            return sum(int(row["epochs"]) for row in csv.DictReader(file))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{metrics} cannot be read ({error}), so it is unknown at which step the trackers continue; restore the "
            f"file, or replace it with an empty one to let their curves start again at step 0"
        ) from None
