"""How well a controller plays the planted task: 0 is chance, 1 is the best return there is.

Returns are discounted by the reward's γ, because only then do the potential terms of an episode cancel exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from esper.config import TrainingConfig
from esper.control.random import RandomController
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_best import best_return
from esper.env.planted_law import Law
from esper.env.slot_env import SlotVectorEnv

Floats = NDArray[np.float64]


class Player(Protocol):
    """Controllers, and agents that learn."""

    def begin(self) -> None: ...

    def act(self, observation: NDArray[np.float32], masks: Mapping[str, NDArray[np.bool_]]) -> NDArray[np.int64]: ...


def discounted_returns(env: SlotVectorEnv, player: Player, seed: int | None = None) -> Floats:
    """Σ γ^t r_t [E] of one episode in every env; ``seed`` sets the env's run seed."""
    observation, info = env.reset(seed=seed)
    player.begin()
    returns, discount = np.zeros(env.num_envs), 1.0
    while not env.done.all():
        observation, rewards, _, _, info = env.step(player.act(observation, info["action_mask"]))
        returns += discount * rewards
        discount *= env.config.reward.gamma
    return returns


@dataclass(frozen=True)
class Scale:
    """What a return of the planted task is measured against."""

    random: float
    """Mean return of the random controller."""
    best: float
    """The best return under the law without noise."""

    def score(self, value: float) -> float:
        """(R − R_random) / (R_best − R_random)."""
        return (value - self.random) / (self.best - self.random)


def planted_scale(config: TrainingConfig | None = None, law: Law | None = None) -> Scale:
    """Play chance for one episode in every env, and search for the best schedule (seconds)."""
    env = PlantedVectorEnv(config, law)
    chance = RandomController(env.action_spec, env.layout, env.num_envs, env.config.run.seed)
    random = float(discounted_returns(env, chance, env.config.run.seed).mean())
    return Scale(random, best_return(env.config, env.law).discounted)
