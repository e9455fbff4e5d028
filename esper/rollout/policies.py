"""Controllers by their command-line names, trained agents among them."""

from __future__ import annotations

from esper.config import ConfigError, TrainingConfig
from esper.control.controller import Controller
from esper.control.names import NAMES as CONTROLLERS
from esper.control.names import make_controller
from esper.env.slot_env import SlotVectorEnv
from esper.files.policy import find_policy

NAMES = ("ppo", "checkpoint:PATH", "pretrained", *CONTROLLERS)


def controller_for(name: str, config: TrainingConfig, env: SlotVectorEnv, run_seed: int) -> Controller:
    """Makes the controller called ``name``, or a trained agent that plays greedily, for ``env``.

    Raises:
        ConfigError: the name is unknown (the known ones are listed), there is no trained agent at its path or it cannot
            play this host, or ``ppo`` is named, which has to be trained first.
    """
    check_name(name)
    kind, _, path = name.partition(":")
    if kind in ("pretrained", "checkpoint"):
        return find_policy(path or name).controller(env, run_seed)
    return make_controller(name, config.task.name, env.action_spec, env.layout, env.num_envs, run_seed)


def check_name(name: str) -> None:
    """Raises ConfigError, listing the known names, unless ``name`` is that of a player."""
    kind, _, path = name.partition(":")
    if name == "pretrained" or (kind == "checkpoint" and path):
        return
    if name == "ppo":
        raise ConfigError(
            "ppo must be trained before it can be compared: train it with `esper run`, then name checkpoint:RUN_FOLDER"
        )
    if kind not in {known.partition(":")[0] for known in CONTROLLERS}:
        raise ConfigError(f"unknown controller {name!r}; known: {', '.join(NAMES)}")
