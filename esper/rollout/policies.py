"""Whatever can play an env, by its name on the command line: controllers, and policies out of checkpoints."""

from __future__ import annotations

from pathlib import Path

from esper.config import ConfigError, TrainingConfig
from esper.control.names import NAMES as CONTROLLERS
from esper.control.names import make_controller
from esper.env.slot_env import SlotVectorEnv
from esper.files.checkpoint import load_policy
from esper.files.policy_file import PRETRAINED
from esper.rollout.rollout import Player

NAMES = ("ppo", "checkpoint:PATH", "pretrained", *CONTROLLERS)


def make_player(name: str, config: TrainingConfig, env: SlotVectorEnv, run_seed: int) -> Player:
    """The player of that name for ``env``; one that has learned plays its likeliest actions.

    Raises:
        ConfigError: listing the known names; for a checkpoint that is none, or of another task; or for ``ppo``, which
            has to learn first.
    """
    kind, _, path = name.partition(":")
    if kind == "checkpoint" and path:
        return load_policy(Path(path), env, run_seed)
    if name == "pretrained":
        return load_policy(PRETRAINED, env, run_seed)
    if name == "ppo":
        raise ConfigError(
            "ppo has to learn before it can be compared: train it with `esper run`, then name checkpoint:RUN_FOLDER"
        )
    if kind not in {known.partition(":")[0] for known in CONTROLLERS}:
        raise ConfigError(f"unknown controller {name!r}; known: {', '.join(NAMES)}")
    return make_controller(name, config.task.name, env.action_spec, env.layout, env.num_envs, run_seed)
