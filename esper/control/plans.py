"""A bandit over plans: in each slot the blueprint that pays best by experience, planted as early as possible.

The largest seed is planted first: it has the most to learn, and a small one that waits for its gate would hold it up.
Seeds that are a part of the host at once hold up nothing, and come before all others.

A plan is at most one blueprint a slot, each the best, after its rent, by a draw from what the run has learned of their
worths; the env makes the draw at the start of an episode and shows it in the observation. So this is Thompson sampling
(Thompson 1933) over a linear model of gains: early rounds try everything, later ones play what has paid. In evaluation
the env shows means, and the plan is the best one known."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from esper.config import TrainingConfig
from esper.control.controller import EnvView, PerEnvController
from esper.lifecycle.stage import SeedStage
from esper.spaces.action import ActionSpec, Op, nearest_tempo
from esper.spaces.observation import ObservationLayout


class PlansController(PerEnvController):
    """Carries seeds through as their gates pass, and plants the largest promising seed whenever that is legal.

    Settings are in ``config.plans``.
    """

    EPISODE_STATE = ("given_up",)

    def __init__(
        self,
        spec: ActionSpec,
        layout: ObservationLayout,
        n_envs: int,
        run_seed: int = 0,
        config: TrainingConfig | None = None,
    ) -> None:
        super().__init__(spec, layout, n_envs, run_seed)
        rule, horizon = (config or TrainingConfig()).plans, layout.horizon
        self.patience = rule.patience
        self.tempo = nearest_tempo(rule.ramp * horizon)
        self.life = max(rule.min_life_epochs, math.ceil(rule.life * horizon))
        """Epochs from planting a seed to keeping it."""
        self.blend = max(rule.min_blend_epochs, math.ceil(rule.blend * horizon))
        """The same from the start of blending."""
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

    def _promising(self, env: int, view: EnvView) -> Iterator[tuple[float, float, float, str, str]]:
        """Yields the best seed for each slot that may be planted and pays: whether it is a part of the host at once,
        its size and profit, and the names of slot and blueprint."""
        for slot in self.spec.slots:
            if slot in self.given_up[env]:
                continue
            legal = [name for name in self.spec.blueprints if view.legal(Op.GERMINATE, slot, name)]
            profit, name = max(((view.choice(slot, name, "profit"), name) for name in legal), default=(0.0, ""))
            if profit > 0:
                yield view.choice(slot, name, "at_once"), view.choice(slot, name, "size"), profit, slot, name

    def _stuck(self, view: EnvView, slot: str) -> bool:
        waits = view.stage(slot) in (SeedStage.TRAINING, SeedStage.HOLDING)
        return waits and view.slot(slot, "epochs_in_stage") > self.patience
