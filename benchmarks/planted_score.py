"""Score of a controller on the planted task: 0 is the random controller, 1 is the best possible return.

Returns are discounted by the reward's γ, because only then do the potential terms of an episode cancel exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.planted_best import best_return
from esper.agents.controller import RandomController
from esper.config import TrainingConfig
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.run.rollout import play_round


@dataclass(frozen=True)
class PlantedScale:
    """Reference returns of the planted task."""

    random: float
    """Mean return of the random controller."""
    best: float
    """Best possible return under the law without noise."""

    def score(self, value: float) -> float:
        """(R − R_random) / (R_best − R_random)."""
        return (value - self.random) / (self.best - self.random)


def planted_scale(
    config: TrainingConfig | None = None, law: SimParams | None = None
) -> PlantedScale:
    """Plays the random controller for one episode in every env, and searches for the best schedule (takes seconds)."""
    env = PlantedVectorEnv(config, law)
    chance = RandomController(
        env.action_spec, env.layout, env.num_envs, env.config.run.seed
    )
    random = float(play_round(env, chance, env.config.run.seed).returns.mean())
    return PlantedScale(random, best_return(env.config, env.law).discounted)
