"""Controllers by command-line name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from esper.agents.controller import NoGrowth, PerEnvController
from esper.agents.heuristic import HeuristicController
from esper.agents.plans import PlansController
from esper.agents.plateau import PlateauController
from esper.agents.random import RandomController
from esper.agents.script import ScriptedController, read_schedule, shipped_schedule
from esper.agents.spec import ControllerSpec
from esper.config import ConfigError, TrainingConfig
from esper.spaces.action import ActionSpec
from esper.spaces.observation import ObservationLayout

WITH_SETTINGS: dict[str, Callable[..., PerEnvController]] = {
    "plans": PlansController,
    "heuristic": HeuristicController,
    "plateau": PlateauController,
}
"""Controllers that read their section of the config."""
SIMPLE: dict[str, Callable[..., PerEnvController]] = {
    "random": RandomController,
    "none": NoGrowth,
}


def make_controller(
    name: str,
    task: str,
    spec: ActionSpec,
    layout: ObservationLayout,
    n_envs: int,
    run_seed: int,
    config: TrainingConfig | None = None,
) -> PerEnvController:
    """Makes the controller called ``name``. Raises ConfigError for an unknown name or an invalid schedule.

    ``config`` has the settings of ``heuristic``, ``plateau`` and ``plans``; None: the defaults.
    """
    if name in WITH_SETTINGS:
        return WITH_SETTINGS[name](spec, layout, n_envs, run_seed, config)
    if name in SIMPLE:
        return SIMPLE[name](spec, layout, n_envs, run_seed)
    controller = ControllerSpec.of(name)
    path = schedule_file(controller, task)
    if path is None:
        raise controller.unknown()
    try:
        return ScriptedController(read_schedule(path), spec, layout, n_envs, run_seed)
    except ConfigError as error:
        message = str(error)
        if str(path) not in message:
            message = f"{path}: {message}"
        raise ConfigError(message) from None


def schedule_file(controller: ControllerSpec, task: str) -> Path | None:
    """Returns the file of ``schedule`` or ``schedule:FILE``; None for any other controller.

    Raises ConfigError if no schedule ships for the task.
    """
    if controller.kind != "schedule":
        return None
    return Path(controller.path) if controller.path else shipped_schedule(task)
