"""Reward modes: the terms that each mode pays. The reward is their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from esper.config import RewardConfig
from esper.rewards import terms
from esper.rewards.terms import Floats, RewardState, Transition, Value

Term = Callable[[Transition, RewardConfig], Floats]
Potential = Callable[[RewardState, RewardConfig, int], Value]

POTENTIALS: Mapping[str, Potential] = MappingProxyType(
    {
        "stage_potential": lambda s, config, dwell: config.stage_potential * terms.stage_potential(s, dwell, config),
        "contribution_potential": lambda s, config, _: config.contribution_potential * terms.contribution_potential(s),
        "loss_contribution_potential": lambda s, config, _dwell: (
            config.loss_contribution_potential * terms.loss_contribution_potential(s)
        ),
    }
)
_TERMS: tuple[Term, ...] = (
    terms.benefit, terms.loss_benefit, terms.rent, terms.action_cost, terms.advantage, terms.fossil_cost, terms.governor
)  # fmt: skip
TERMS: Mapping[str, Term] = MappingProxyType({term.__name__: term for term in _TERMS})
MODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "shaped": ("benefit", "rent", "stage_potential", "contribution_potential", "action_cost", "governor"),
        "simplified": ("benefit", "stage_potential", "action_cost", "governor"),
        "advantage": ("advantage", "rent", "governor"),
        "sparse": ("benefit", "fossil_cost", "governor"),
        "loss_shaped": (
            "loss_benefit",
            "rent",
            "stage_potential",
            "loss_contribution_potential",
            "action_cost",
            "governor",
        ),
        "loss_sparse": ("loss_benefit", "fossil_cost", "governor"),
    }
)


class Reward:
    """Rewards of E envs: computes the terms of its mode and keeps the previous step's potential Φ between calls.

    Φ is 0 at reset and at termination, so the discounted potential terms of an episode that terminates sum to exactly
    zero. One that cannot be told, NaN, stays as it was. If ``n_envs`` is None, it is the reward of one env, in scalars.
    """

    def __init__(self, config: RewardConfig, dwell: int, n_envs: int | None = None) -> None:
        self.config, self.dwell, self.names = config, dwell, MODES[config.mode]
        self.stored = {name: np.zeros(() if n_envs is None else n_envs) for name in self.names if name in POTENTIALS}

    def reset(self, mask: NDArray[np.bool_] | None = None) -> None:
        """Starts episodes in the envs of ``mask`` bool [E]; None for all."""
        for potential in self.stored.values():
            potential[... if mask is None else mask] = 0.0

    @property
    def potential(self) -> Floats:
        """Sum [E] of the previous step's potentials."""
        return sum(self.stored.values(), np.zeros(()))

    def pay(self, transition: Transition, active: NDArray[np.bool_] | bool = True) -> dict[str, Floats]:
        """Returns the terms of this step by name, float64 [E] each; the reward is their sum.

        Envs that are not ``active`` (bool [E]) made no step: their terms are 0 and their Φ is unchanged.
        """
        paid: dict[str, Floats] = {}
        for name in self.names:
            if name in POTENTIALS:
                value = POTENTIALS[name](transition.after, self.config, self.dwell)
                before = self.stored[name]
                value = np.where(np.isnan(value), before, value)
                after = np.where(active, np.where(transition.terminated, 0.0, value), before)
                paid[name] = np.where(active, self.config.gamma * after - before, 0.0)
                self.stored[name] = after
            else:
                paid[name] = np.where(active, TERMS[name](transition, self.config), 0.0)
        return paid
