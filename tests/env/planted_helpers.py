"""Envs of the planted task, played by controllers and by lists of actions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.agents.controller import Controller
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams

Step = tuple[NDArray[np.float32], NDArray[np.float64], dict[str, Any]]


def planted(
    n_envs: int = 4,
    horizon: int = 50,
    law: SimParams | None = None,
    **sections: dict[str, Any],
) -> PlantedVectorEnv:
    env = {"n_envs": n_envs, "episode_length": horizon, **sections.pop("env", {})}
    return PlantedVectorEnv(TrainingConfig.parse({"env": env, **sections}), law)


def play(env: PlantedVectorEnv, player: Controller, seed: int | None = 0) -> list[Step]:
    """Observation, rewards and info of the reset (rewards 0) and of every step of one episode."""
    observation, info = env.reset(seed=seed)
    player.begin()
    steps: list[Step] = [(observation, np.zeros(env.num_envs), info)]
    while not env.done.all():
        observation, rewards, _, _, info = env.step(
            player.act(observation, info["action_mask"])
        )
        steps.append((observation, rewards, info))
    return steps


def life(
    env: PlantedVectorEnv, start: int, blueprint: str, incubation: int = 4, **heads: Any
) -> dict[int, Any]:
    """One seed in r0c0 from ``start`` to a fossil, at a tempo of 3 epochs if ``heads`` do not say."""
    encode, tempo = env.action_spec.encode, heads.pop("tempo", 3)
    blended = start + 1 + incubation
    return {
        start: encode(Op.GERMINATE, "r0c0", blueprint, tempo=tempo, **heads),
        start + 1: encode(Op.ADVANCE, "r0c0"),
        blended: encode(Op.ADVANCE, "r0c0"),
        blended + tempo - 1: encode(Op.ADVANCE, "r0c0"),
        blended + tempo: encode(Op.FOSSILIZE, "r0c0"),
    }
