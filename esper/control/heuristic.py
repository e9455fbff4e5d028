"""A hand-written rule for growing a network. It sees exactly what a learning controller sees."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from esper.control.controller import EnvView, PerEnvController
from esper.lifecycle.stage import SeedStage
from esper.spaces.action import TEMPOS, ActionSpec, Op
from esper.spaces.observation import HISTORY, ObservationLayout

# Accuracies are fractions and contributions are in units of 10 pp, as in the observation.
LONG = 150
"""Reference horizon of the rates below; a shorter episode trains more in each epoch."""
PLATEAU = 0.005
"""An accuracy that rises by less than this in 1/150 of an episode is on a plateau."""
STABLE_IMPROVEMENT = 0.03
"""A loss that falls by less than this fraction in 1/150 of an episode has settled."""
DROP = 0.02
"""A seed that costs more accuracy than this since its birth is pruned."""
WORTH_KEEPING = 0.05
"""Contribution, 0.5 pp, above which a held seed is fossilized."""
PRUNE_PENALTY, PENALTY_DECAY, PENALTY_LIMIT = 2.0, 0.5, 1.0


class HeuristicController(PerEnvController):
    """Fossilizes seeds that contribute, prunes seeds that harm, advances seeds whose gate would open, and plants a seed
    in the next free slot once the host has reached a plateau.

    Blueprints rotate in order of registration. Each prune adds a penalty of 2 to its blueprint, every later
    germination halves all penalties, and a blueprint with a penalty of 1 or more is skipped.
    """

    EPISODE_STATE = ("penalty", "turn", "accuracy_at_birth")

    def __init__(self, spec: ActionSpec, layout: ObservationLayout, n_envs: int, run_seed: int = 0) -> None:
        super().__init__(spec, layout, n_envs, run_seed)
        share = layout.horizon / LONG
        self.patience = min(HISTORY, max(2, math.ceil(3 * share)))
        self.trial_period = max(2, math.ceil(5 * share))
        self.tempo = min(TEMPOS, key=lambda tempo: abs(tempo - 5 * share))
        self.plateau, self.stable_improvement = PLATEAU / share, STABLE_IMPROVEMENT / share
        self.penalty: list[dict[str, float]] = [{} for _ in range(n_envs)]
        self.turn = [0] * n_envs
        self.accuracy_at_birth: list[dict[str, float]] = [{} for _ in range(n_envs)]

    def begin_episode(self, env: int) -> None:
        self.penalty[env] = dict.fromkeys(self.spec.blueprints, 0.0)
        self.turn[env] = 0
        self.accuracy_at_birth[env] = {}

    def choose(self, env: int, view: EnvView) -> NDArray[np.int64]:
        for slot in self.spec.slots:
            if view.legal(Op.FOSSILIZE, slot) and self._worth_keeping(slot, view):
                return self.spec.encode(Op.FOSSILIZE, slot)
        for slot in self.spec.slots:
            if view.legal(Op.PRUNE, slot) and self._harmful(env, slot, view):
                self.penalty[env][view.blueprint(slot) or ""] += PRUNE_PENALTY
                return self.spec.encode(Op.PRUNE, slot)
        for slot in self.spec.slots:
            if view.legal(Op.ADVANCE, slot) and view.slot(slot, "gate_passed"):
                return self.spec.encode(Op.ADVANCE, slot)
        if self._settled(view):
            return self._germinate(env, view)
        return self.spec.encode(Op.WAIT)

    def _worth_keeping(self, slot: str, view: EnvView) -> bool:
        contribution, error = view.slot(slot, "contribution"), view.slot(slot, "contribution_error")
        return bool(view.slot(slot, "gate_passed")) and contribution > WORTH_KEEPING and contribution > error

    def _harmful(self, env: int, slot: str, view: EnvView) -> bool:
        """True if accuracy fell by more than 2 pp since germination, or a held seed's contribution is below −1 SE.

        Only seeds in the forward pass (BLENDING or HOLDING) past the trial period count.
        """
        stage = view.stage(slot)
        if stage not in (SeedStage.BLENDING, SeedStage.HOLDING) or view.age(slot) < self.trial_period:
            return False
        fallen = view.value("validation_accuracy") < self.accuracy_at_birth[env].get(slot, 0.0) - DROP
        return fallen or (
            stage is SeedStage.HOLDING and view.slot(slot, "contribution") < -view.slot(slot, "contribution_error")
        )

    def _settled(self, view: EnvView) -> bool:
        """True if loss and accuracy improved by less than their thresholds per epoch in the last ``patience`` epochs.

        The test is on the window as a whole, because single epochs of a small host are too noisy.
        """
        if view.epoch < self.patience:
            return False
        before = math.expm1(view.value(f"loss_{self.patience}_ago"))
        improved = before - math.expm1(view.value("validation_loss"))
        gained = view.value("validation_accuracy") - view.value(f"accuracy_{self.patience}_ago")
        return improved < self.patience * self.stable_improvement * before and gained < self.patience * self.plateau

    def _germinate(self, env: int, view: EnvView) -> NDArray[np.int64]:
        """Plants the next blueprint in turn without a high penalty in the first slot that can afford it, else WAITs."""
        names = self.spec.blueprints
        rotation = [names[(self.turn[env] + i) % len(names)] for i in range(len(names))]
        for name in rotation:
            slot = next((s for s in self.spec.slots if view.legal(Op.GERMINATE, s, name)), None)
            if slot is None or self.penalty[env][name] >= PENALTY_LIMIT:
                continue
            self.turn[env] = names.index(name) + 1
            self.penalty[env] = {known: PENALTY_DECAY * value for known, value in self.penalty[env].items()}
            self.accuracy_at_birth[env][slot] = view.value("validation_accuracy")
            return self.spec.encode(Op.GERMINATE, slot, name, tempo=self.tempo)
        return self.spec.encode(Op.WAIT)
