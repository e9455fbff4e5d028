"""Makes controllers by name: rules, schedules, trained agents, and custom ones in Python files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from esper.agents.controller import Controller, NoGrowth, PerEnvController, RandomController
from esper.agents.heuristic import HeuristicController, NeedController, PlateauController
from esper.agents.needs import ADVISOR
from esper.agents.script import ScriptedController, read_schedule, schedule_file
from esper.agents.spec import SAVED, ControllerSpec
from esper.config import ConfigError, TrainingConfig
from esper.core.action import ActionSpec
from esper.core.observation import ObservationLayout
from esper.data.user_code import run_user_code
from esper.env.slot_env import SlotVectorEnv

OwnController = Callable[[SlotVectorEnv], Controller] | type[PerEnvController]
"""A function, conventionally called ``make_controller``, that makes a controller for the envs of a vector env; or a
subclass of ``PerEnvController``."""


def controller_for(
    controller: str | OwnController,
    config: TrainingConfig,
    env: SlotVectorEnv,
    run_seed: int,
) -> Controller:
    """Makes a rule, a trained agent or a custom controller for ``env``.

    Raises:
        ConfigError: the name is unknown (the known ones are listed), there is no trained agent at its path or it cannot
            play this host, ``ppo`` is named, which has to be trained first, or there is no such custom controller.
    """
    spec = ControllerSpec.of(controller).check()
    if spec.make is not None:
        return _made(spec.make, env, run_seed)
    if spec.is_code:
        return run_user_code("controller", spec.name, lambda make: _made(make, env, run_seed))
    if spec.kind in SAVED:
        # Few loops follow a trained agent, and the others need not load what its file is read with.
        from esper.files.policy import find_policy

        return find_policy(spec.path or spec.name).controller(env, run_seed, greedy=spec.kind != "sampled")
    return make_controller(spec.name, config.task.name, env.action_spec, env.layout, env.num_envs, run_seed, config)


def _advised(*arguments: Any) -> PerEnvController:
    # Few loops ask the advisor, and the others need not load its networks.
    from esper.agents.advised import AdvisedController

    return AdvisedController(*arguments)


RULES: dict[str, Callable[..., PerEnvController]] = {
    ADVISOR: _advised,
    "heuristic": HeuristicController,
    "plateau": PlateauController,
    "need": NeedController,
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
    """Makes one of ``RULES``, or a schedule. Raises ConfigError for an unknown name or an invalid schedule.

    ``config`` has the settings of ``heuristic``, ``plateau`` and ``need``; None: the defaults.
    """
    if name in RULES:
        return RULES[name](spec, layout, n_envs, run_seed, config)
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


MEMBERS = ("episode", "begin", "act", "memory_state", "load_memory_state")


def loaded(controller: str | OwnController) -> str | OwnController:
    """Returns the callable that ``path.py:function`` names, or any other controller as it is.

    Raises ConfigError if the file cannot be run or has no such function.
    """
    if isinstance(controller, str) and ControllerSpec.of(controller).is_code:
        return run_user_code("controller", controller, lambda make: make)
    return controller


def _made(
    make: Callable[..., Any],
    env: SlotVectorEnv,
    run_seed: int,
) -> Controller:
    rule = make if isinstance(make, type) and issubclass(make, PerEnvController) else None
    if rule is not None:
        return rule(env.action_spec, env.layout, env.num_envs, run_seed)
    controller: Controller = make(env)
    name = ControllerSpec.of(make).name
    missing = [member for member in MEMBERS if not hasattr(controller, member)]
    if missing:
        raise ConfigError(
            f"{name} returned {type(controller).__name__}, which has no {', '.join(missing)}; a controller "
            f"has {', '.join(MEMBERS)} (esper.agents.controller.Controller)"
        )
    shape = np.shape(controller.episode)
    if shape != (env.num_envs,):
        raise ConfigError(
            f"{name}: the controller's episode has shape {list(shape)}; expected an int "
            f"array [{env.num_envs}], one number per env"
        )
    return controller
