"""Controllers of a user's own: a callable that makes one, or the name of such a callable in a Python file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from esper.agents.controller import Controller, PerEnvController
from esper.agents.spec import FORM, UNNAMED, ControllerSpec
from esper.config import ConfigError
from esper.data.user_code import refuse_untrusted, run_user_code
from esper.env.slot_env import SlotVectorEnv

OwnController = Callable[[SlotVectorEnv], Controller] | type[PerEnvController]
"""A function, conventionally called ``make_controller``, that makes a controller for the envs of a vector env; or a
subclass of ``PerEnvController``."""

MEMBERS = ("episode", "begin", "act", "memory_state", "load_memory_state")


def make_own(
    controller: str | OwnController,
    env: SlotVectorEnv,
    run_seed: int,
) -> Controller:
    """Makes the controller for ``env``; ``run_seed`` is the seed of a ``PerEnvController``.

    Raises ConfigError if it is named and cannot be loaded, or if what the callable returns is not a controller.
    """
    if isinstance(controller, str):
        return run_user_code("controller", controller, lambda make: _made(make, env, run_seed))
    return _made(controller, env, run_seed)


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


def confirmed_controller(
    recorded: str,
    named: str | OwnController | None,
    where: str,
    option: str = "--controller",
) -> str | OwnController:
    """Returns the controller to resume with: the one ``recorded`` in the files of ``where``, which the user may have
    ``named``.

    Code is loaded only from a name, or is a callable, that the user gave. Raises ConfigError if that is missing or is
    another controller, or if the recorded one was a callable without a name.
    """
    before = ControllerSpec.of(recorded)
    if before.kind == UNNAMED:
        raise ConfigError(
            f"{where} cannot be resumed: its controller was the callable {before.path}, which no "
            f"file and name lead to, so nothing shows that another callable is the same. Use a function or class of a "
            f"file, {FORM}, for a run that is to be resumed"
        )
    if named is None:
        if before.is_code:
            raise refuse_untrusted("controller", recorded, where, option)
        return recorded
    now = ControllerSpec.of(named)
    if not before.same_as(now):
        raise ConfigError(f"{where} is a run of the controller {recorded!r}, not of {now.name!r}")
    return named
