"""Reward modes: which terms are paid. The sum of the terms is the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from esper.config import RewardConfig
from esper.rewards import terms
from esper.rewards.terms import RewardState, Transition

Term = Callable[[Transition, RewardConfig], float]
Potential = Callable[[RewardState, RewardConfig, int], float]

POTENTIALS: Mapping[str, Potential] = MappingProxyType(
    {
        "stage_potential": lambda s, config, dwell: config.stage_potential * terms.stage_potential(s, dwell),
        "contribution_potential": lambda s, config, _dwell: (
            config.contribution_potential * terms.contribution_potential(s)
        ),
    }
)
TERMS: Mapping[str, Term] = MappingProxyType(
    {
        "benefit": terms.benefit,
        "rent": terms.rent,
        "action_cost": terms.action_cost,
        "advantage": terms.advantage,
        "fossil_cost": terms.fossil_cost,
        "governor": terms.governor,
    }
)
MODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "shaped": ("benefit", "rent", "stage_potential", "contribution_potential", "action_cost", "governor"),
        "simplified": ("benefit", "stage_potential", "action_cost", "governor"),
        "advantage": ("advantage", "rent", "governor"),
        "sparse": ("benefit", "fossil_cost", "governor"),
    }
)


class Reward:
    """Rewards of one env: pays the terms of its mode and keeps Φ of the previous step between calls.

    Φ is 0 at reset and at termination, so the discounted potential terms of an episode sum to exactly zero.
    """

    def __init__(self, config: RewardConfig, dwell: int) -> None:
        self.config = config
        self.dwell = dwell
        self.names = MODES[config.mode]
        self.reset()

    def reset(self) -> None:
        self.stored = {name: 0.0 for name in self.names if name in POTENTIALS}

    @property
    def potential(self) -> float:
        """Φ of the previous step, summed."""
        return sum(self.stored.values())

    def pay(self, transition: Transition) -> dict[str, float]:
        """Terms of this step by name; the reward is their sum."""
        paid: dict[str, float] = {}
        for name in self.names:
            if name in POTENTIALS:
                after = 0.0 if transition.terminated else POTENTIALS[name](transition.after, self.config, self.dwell)
                paid[name] = self.config.gamma * after - self.stored[name]
                self.stored[name] = after
            else:
                paid[name] = TERMS[name](transition, self.config)
        return paid
