"""A bandit over plans: in each slot the blueprint that pays best by experience, planted as early as possible.

The largest seed is planted first: it has the most to learn, and a small one that waits for its gate would hold it up.
Seeds that are a part of the host at once hold up nothing, and come before all others.

A plan is at most one blueprint a slot, each the best, after its rent, by a draw from what the run has learned of their
worths; the env makes the draw at the start of an episode and shows it in the observation. So this is Thompson sampling
(Thompson 1933) over a linear model of gains: early rounds try everything, later ones play what has paid. In evaluation
the env shows means, and the plan is the best known."""

from __future__ import annotations

import math
from typing import NamedTuple

from esper.agents.controller import EnvView, PerEnvController
from esper.core.action import Op, nearest_tempo
from esper.core.arrays import Ints
from esper.core.stage import SeedStage


class Candidate(NamedTuple):
    """A seed that could be planted. The largest one in the order of these fields is planted first."""

    at_once: float
    size: float
    profit: float
    slot: str
    blueprint: str


class PlansController(PerEnvController):
    """Carries seeds through as their gates pass, and plants the largest promising seed whenever that is legal.

    Settings are in ``config.plans``.
    """

    EPISODE_STATE = ("given_up",)

    def prepare(self) -> None:
        rule = self.config.plans
        horizon = self.layout.horizon
        self.patience = rule.patience
        self.tempo = nearest_tempo(rule.ramp * horizon)
        self.life = max(rule.min_life_epochs, math.ceil(rule.life * horizon))
        """Epochs from planting a seed to keeping it."""
        self.blend = max(rule.min_blend_epochs, math.ceil(rule.blend * horizon))
        """The same from the start of blending."""
        self.given_up: list[list[str]] = [[] for _ in range(self.n_envs)]
        """Slots whose seed was given up in this episode."""

    def begin_episode(self, env: int) -> None:
        self.given_up[env] = []

    def choose(self, env: int, view: EnvView) -> Ints:
        for op in (Op.FOSSILIZE, Op.ADVANCE):
            for slot in self.spec.slots:
                if not view.legal(op, slot) or not view.slot(slot, "gate_passed"):
                    continue
                # What is blended now could not be kept before the end.
                late = view.stage(slot) is SeedStage.TRAINING and view.epochs_left < self.blend
                if not late:
                    return self.spec.encode(op, slot)

        for slot in self.spec.slots:
            if view.legal(Op.PRUNE, slot) and self._stuck(view, slot):
                self.given_up[env].append(slot)
                return self.spec.encode(Op.PRUNE, slot)

        if view.epochs_left < self.life:
            return self.spec.encode(Op.WAIT)
        candidates = self._candidates(env, view)
        if not candidates:
            return self.spec.encode(Op.WAIT)
        best = max(candidates)
        return self.spec.encode(Op.GERMINATE, best.slot, best.blueprint, tempo=self.tempo)

    def _candidates(self, env: int, view: EnvView) -> list[Candidate]:
        """Returns the seed of the largest profit for each slot in which one may be planted and pays."""
        candidates = []
        for slot in self.spec.slots:
            if slot in self.given_up[env] or not view.legal(Op.GERMINATE, slot):
                continue
            legal = [name for name in self.spec.blueprints if view.legal(Op.GERMINATE, slot, name)]
            # Of equal profits the last name wins.
            profits = [(view.choice(slot, name, "profit"), name) for name in legal]
            profit, name = max(profits, default=(0.0, ""))
            if profit > 0:
                candidate = Candidate(
                    view.choice(slot, name, "at_once"),
                    view.choice(slot, name, "size"),
                    profit,
                    slot,
                    name,
                )
                candidates.append(candidate)
        return candidates

    def _stuck(self, view: EnvView, slot: str) -> bool:
        """True for a seed that has waited for its gate for longer than patience lasts."""
        waits = view.stage(slot) in (SeedStage.TRAINING, SeedStage.HOLDING)
        # Both are fractions of the horizon.
        return waits and view.slot(slot, "epochs_in_stage") > self.patience
