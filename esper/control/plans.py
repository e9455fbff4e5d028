"""A bandit over plans: in each slot the blueprint that pays best by experience, planted as early as possible.

The largest seed is planted first: it has the most to learn, and a small one that waits for its gate would hold it up.

A plan is at most one blueprint a slot, each the best, after its rent, by a draw from what the run has learned of their
worths; the env makes the draw at the start of an episode and shows it in the observation. So this is Thompson sampling
(Thompson 1933) over a linear model of gains: early rounds try everything, later ones play what has paid. In evaluation
the env shows means, and the plan is the best one known."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from esper.control.controller import EnvView, PerEnvController
from esper.lifecycle.stage import SeedStage
from esper.spaces.action import TEMPOS, ActionSpec, Op
from esper.spaces.observation import ObservationLayout

TEMPO_SHARE = 1 / 30
"""Epochs of a ramp, as a fraction of the horizon."""
PATIENCE_SHARE = 1 / 3
"""A seed that waits for its gate for longer than this fraction of the horizon is given up, be it incubating or blended:
a host that leans on a seed needs time to do without it."""
LIFE = 7, 1 / 5
"""Epochs from planting a seed to keeping it: at least these, and this fraction of the horizon."""
BLEND = 4, 2 / 15
"""The same from the start of blending: a seed that is blended and not kept is a loss."""


class PlansController(PerEnvController):
    """Carries seeds through as their gates pass, and plants the largest promising seed whenever that is legal."""

    EPISODE_STATE = ("given_up",)

    def __init__(self, spec: ActionSpec, layout: ObservationLayout, n_envs: int, run_seed: int = 0) -> None:
        super().__init__(spec, layout, n_envs, run_seed)
        self.tempo = min(TEMPOS, key=lambda tempo: abs(tempo - TEMPO_SHARE * layout.horizon))
        self.life, self.blend = (max(least, math.ceil(share * layout.horizon)) for least, share in (LIFE, BLEND))
        self.given_up: list[list[str]] = [[] for _ in range(n_envs)]
        """Slots whose seed was given up in this episode."""

    def begin_episode(self, env: int) -> None:
        self.given_up[env] = []

    def choose(self, env: int, view: EnvView) -> NDArray[np.int64]:
        for op in (Op.FOSSILIZE, Op.ADVANCE):
            for slot in self.spec.slots:
                late = view.stage(slot) is SeedStage.TRAINING and view.epochs_left < self.blend
                if view.legal(op, slot) and view.slot(slot, "gate_passed") and not late:
                    return self.spec.encode(op, slot)
        for slot in self.spec.slots:
            if view.legal(Op.PRUNE, slot) and self._stuck(view, slot):
                self.given_up[env].append(slot)
                return self.spec.encode(Op.PRUNE, slot)
        if view.epochs_left < self.life or not (seeds := list(self._promising(env, view))):
            return self.spec.encode(Op.WAIT)
        *_, slot, name = max(seeds)
        return self.spec.encode(Op.GERMINATE, slot, name, tempo=self.tempo)

    def _promising(self, env: int, view: EnvView) -> Iterator[tuple[float, float, str, str]]:
        """Yields size, profit, slot and blueprint of the best seed for each slot that may be planted and pays."""
        for slot in self.spec.slots:
            if slot in self.given_up[env]:
                continue
            legal = [name for name in self.spec.blueprints if view.legal(Op.GERMINATE, slot, name)]
            profit, name = max(((view.value(f"{slot}/{name}/profit"), name) for name in legal), default=(0.0, ""))
            if profit > 0:
                yield view.value(f"{slot}/{name}/size"), profit, slot, name

    def _stuck(self, view: EnvView, slot: str) -> bool:
        waits = view.stage(slot) in (SeedStage.TRAINING, SeedStage.HOLDING)
        return waits and view.slot(slot, "epochs_in_stage") > PATIENCE_SHARE
