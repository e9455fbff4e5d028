"""Reward modes: the terms that each mode pays. The reward is their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from esper.config import RewardConfig
from esper.core import reward_terms as terms
from esper.core.arrays import Bools, Floats
from esper.core.reward_terms import Flag, RewardState, Transition, Value

Term = Callable[[Transition, RewardConfig], Floats]
Potential = Callable[[RewardState, RewardConfig, int], Value]


_POTENTIALS: tuple[Potential, ...] = (
    terms.stage_potential,
    terms.contribution_potential,
    terms.loss_contribution_potential,
)
POTENTIALS: Mapping[str, Potential] = {term.__name__: term for term in _POTENTIALS}
_TERMS: tuple[Term, ...] = (
    terms.benefit,
    terms.loss_benefit,
    terms.score,
    terms.price,
    terms.rent,
    terms.action_cost,
    terms.advantage,
    terms.fossil_cost,
    terms.governor,
)
TERMS: Mapping[str, Term] = {term.__name__: term for term in _TERMS}
PRICES = ("action_cost", "price")
"""Terms that every decision pays, at most one in a mode; the others are of an epoch."""
MODES: Mapping[str, tuple[str, ...]] = {
    "shaped": (
        "benefit",
        "rent",
        "stage_potential",
        "contribution_potential",
        "action_cost",
        "governor",
    ),
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
    "priced": ("score", "price", "governor"),
}


def price_of(
    share: Floats | float,
    of_budget: Floats | float,
    of_host: Floats | float,
    doubling: Floats | float,
    config: RewardConfig,
) -> Floats:
    """Returns the rise of final accuracy that makes up for what a mode takes for seeds kept all episode long, pp.

    ``share`` is the size of each seed, of which it is the only one, in sizes of the host, see ``EpisodeRules.share``;
    ``of_budget`` is its parameters as a share of the budget, and ``of_host`` as a share of the host's.
    ``doubling`` is the price of a doubling, pp.
    """
    names = MODES[config.mode]
    paid = np.zeros(np.shape(share))
    if "rent" in names:
        paid = paid + terms.rent_rate(share, config)
    if "fossil_cost" in names:
        paid = paid + config.sparse_parameter_cost * np.asarray(of_budget)
    if "price" in names:
        paid = paid + doubling * np.log2(1 + np.asarray(of_host)) / config.benefit_scale
    return np.asarray(config.benefit_scale * paid)


class Reward:
    """Rewards of E envs: computes the terms of its mode and keeps the previous step's potential Φ between calls.

    Φ is 0 at reset and at termination, so the discounted potential terms of an episode that terminates sum to exactly
    zero. One that cannot be told, NaN, stays as it was. If ``n_envs`` is None, it is the reward of one env, in scalars.
    """

    def __init__(
        self,
        config: RewardConfig,
        dwell: int,
        n_envs: int | None = None,
    ) -> None:
        self.config = config
        self.dwell = dwell
        self.names = MODES[config.mode]
        shape = () if n_envs is None else (n_envs,)
        self.stored = {name: np.zeros(shape) for name in self.names if name in POTENTIALS}

    def reset(self, mask: Bools | None = None) -> None:
        """Starts episodes in the envs of ``mask`` bool [E]; None for all."""
        for potential in self.stored.values():
            if mask is None:
                potential[...] = 0.0
            else:
                potential[mask] = 0.0

    @property
    def potential(self) -> Floats:
        """Sum [E] of the previous step's potentials."""
        return sum(self.stored.values(), np.zeros(()))

    def pay(
        self,
        transition: Transition,
        active: Flag = True,
        trained: Flag = True,
    ) -> dict[str, Floats]:
        """Returns the terms of this step by name, float64 [E] each; the reward is their sum.

        Envs that are not ``active`` (bool [E]) made no step: their terms are 0 and their Φ is unchanged. Those that
        have not ``trained`` (bool [E]) pay the price of the action only. Their Φ is unchanged as well: such a step has
        the discount 1, so the potential terms of an episode cancel as they do without it.
        """
        paid: dict[str, Floats] = {}
        for name in self.names:
            counts = np.asarray(active)
            if name not in PRICES:
                counts = counts & trained
            term = self._term(name, transition, counts)
            paid[name] = np.where(counts, term, 0.0)
        return paid

    def _term(
        self,
        name: str,
        transition: Transition,
        active: Flag,
    ) -> Floats:
        """Returns a term of this step; if it is that of a potential, stores the present one for the next step."""
        if name in TERMS:
            return TERMS[name](transition, self.config)
        # γΦ(s') − Φ(s), with Φ(s') = 0 at a termination, and Φ(s') = Φ(s) if it cannot be told.
        before = self.stored[name]
        weight = getattr(self.config, name)
        value = weight * POTENTIALS[name](transition.after, self.config, self.dwell)
        value = np.where(np.isnan(value), before, value)
        value = np.where(transition.terminated, 0.0, value)
        after = np.where(active, value, before)
        self.stored[name] = after
        return self.config.gamma * after - before
