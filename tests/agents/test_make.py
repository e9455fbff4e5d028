"""Controllers by their command-line names."""

from __future__ import annotations

from typing import Any

import pytest

from esper.agents.make import controller_for
from esper.config import ConfigError, TrainingConfig
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_backend import SimParams


def planted(n_envs: int = 4, episode_length: int = 4, **law: Any) -> PlantedVectorEnv:
    env = {"n_envs": n_envs, "episode_length": episode_length}
    config = TrainingConfig.parse({"task": {"name": "planted"}, "env": env})
    return PlantedVectorEnv(config, SimParams(**law))


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint:"])
def test_a_checkpoint_without_a_path_is_not_a_controller(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"unknown controller '{name}' .*; known: ppo, checkpoint:PATH, pretrained",
    ):
        controller_for(name, TrainingConfig(), planted(), 0)


def test_ppo_is_not_played_before_it_learned() -> None:
    with pytest.raises(
        ConfigError, match="ppo must be trained before it can be compared"
    ):
        controller_for("ppo", TrainingConfig(), planted(), 0)
