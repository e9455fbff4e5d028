"""Detection of learning anomalies in the figures of one update, with advice.

Detection has no state: it depends only on the update's event, so a resumed run or a log that is read again gives the
same results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from esper.config import AnomalyConfig
from esper.telemetry.event import AnomalyDetected, PolicyUpdated, RoundCompleted
from esper.telemetry.text import count

KINDS = {
    "not_finite": "check the task's losses and rewards, and lower ppo.learning_rate; if the agent's weights are "
    "not finite either, return to an earlier checkpoint",
    "ratio_exploded": "lower ppo.learning_rate, ppo.update_epochs or ppo.target_kl",
    "ratio_collapsed": "lower ppo.learning_rate, ppo.update_epochs or ppo.target_kl",
    "entropy_collapsed": "raise ppo.entropy_start, or lower ppo.learning_rate or ppo.prior",
    "value_collapsed": "raise ppo.value_coefficient or ppo.update_epochs; check whether rewards are clipped "
    "(ppo.reward_clip)",
    "value_wrong": "lower ppo.learning_rate, set ppo.value_clip, or raise env.n_envs for more data per update",
    "gradient_vanished": "check whether rewards differ between hosts; raise ppo.entropy_start, or start with "
    "another run.seed",
    "illegal_actions": "choose by the mask: view.legal(op, slot, blueprint) in a rule",
    "gradient_exploded": "lower ppo.learning_rate or ppo.reward_clip, or raise ppo.max_grad_norm",
}
"""Advice by anomaly."""


def illegal_actions(played: RoundCompleted, first: str) -> list[AnomalyDetected]:
    """Returns the warning about a round's illegal actions, of which ``first`` describes one; [] if there were none."""
    number = played.illegal_actions
    if not number:
        return []
    kind = "illegal_actions"
    words = f"{count(number, 'illegal action')} in {count(played.epochs, 'epoch')} became WAIT; the first: {first}"
    return [AnomalyDetected(played.round, kind, None, float(number), 0.0, words, KINDS[kind])]


Finding = tuple[str, str | None, float, float, str]
"""Key of KINDS, head, measured value, threshold, description."""


@dataclass(frozen=True)
class AnomalyDetector:
    """Checks updates for anomalies.

    Args:
        limits: thresholds of the warnings.
        max_grad_norm: norm that gradients are clipped to, ``ppo.max_grad_norm``.
        rounds: rounds of the whole run, which define what is early or late.
        grouped: whether the other envs of a group are the baseline of returns (``ppo.group``), so that a critic has
            little to predict, and is not judged.
    """

    limits: AnomalyConfig
    max_grad_norm: float
    rounds: int
    grouped: bool = False

    def look(self, update: PolicyUpdated) -> list[AnomalyDetected]:
        """Returns the anomalies of one update, each once. Figures that are missing in an older log are skipped."""
        findings = chain(
            self._not_finite(update),
            self._ratio(update),
            self._entropy(update),
            self._value(update),
            self._gradient(update),
        )
        return [
            AnomalyDetected(update.round, kind, head, measured, threshold, words, KINDS[kind])
            for kind, head, measured, threshold, words in findings
        ]

    def _not_finite(self, update: PolicyUpdated) -> Iterator[Finding]:
        if update.broken_steps:
            words = f"{update.broken_steps:,} steps contain non-finite values: nothing was learned from this round"
            yield "not_finite", None, float(update.broken_steps), 0.0, words
        if update.skipped_minibatches:
            words = f"{update.skipped_minibatches} minibatches skipped: their loss or gradient was not finite"
            yield "not_finite", None, float(update.skipped_minibatches), 0.0, words

    def _ratio(self, update: PolicyUpdated) -> Iterator[Finding]:
        high = self.limits.ratio_high
        low = self.limits.ratio_low
        if update.ratio_max is not None and update.ratio_max > high:
            words = f"an action became {update.ratio_max:.3g} times likelier in one update"
            yield "ratio_exploded", None, update.ratio_max, high, words
        if update.ratio_min is not None and update.ratio_min < low:
            words = f"an action fell to {update.ratio_min:.2g} of its probability in one update"
            yield "ratio_collapsed", None, update.ratio_min, low, words

    def _entropy(self, update: PolicyUpdated) -> Iterator[Finding]:
        limits = self.limits
        # Late in a run, an agent may be sure of its choices.
        if update.round > limits.entropy_until * self.rounds:
            return
        for head, entropy in update.choice_entropies.items():
            choices = update.head_choices.get(head, 0)
            if choices >= limits.min_choices and entropy < limits.entropy:
                words = f"head {head} has almost stopped exploring: entropy {entropy:.2g} of 1 over {choices:,} choices"
                yield "entropy_collapsed", head, entropy, limits.entropy, words

    def _value(self, update: PolicyUpdated) -> Iterator[Finding]:
        limits = self.limits
        values = update.value_std
        targets = update.target_std
        # Early in a run, a critic may still be wrong.
        if self.grouped or update.round <= limits.critic_after or self._too_few(update):
            return
        if values is None or targets is None or targets < limits.target_spread:
            return
        # How much values should differ at least, by how much their targets do.
        least = limits.value_spread * targets
        if values < least:
            words = f"the critic's values hardly differ between states: std {values:.2g}, targets {targets:.2g}"
            yield "value_collapsed", None, values, least, words
        if update.explained_variance < limits.explained_variance:
            words = f"the critic predicts worse than a constant: explained variance {update.explained_variance:.2f}"
            yield "value_wrong", None, update.explained_variance, limits.explained_variance, words

    def _gradient(self, update: PolicyUpdated) -> Iterator[Finding]:
        if not update.minibatches or not math.isfinite(update.gradient_norm) or self._too_few(update):
            return
        norm = update.gradient_norm
        small = self.limits.gradient_small
        large = self.limits.gradient_large * self.max_grad_norm
        if norm < small:
            yield "gradient_vanished", None, norm, small, f"gradient norm {norm:.2g}"
        if norm > large:
            words = f"gradient norm {norm:.3g}"
            if update.clipped_gradients is not None:
                words += f", {update.clipped_gradients:.0%} of them clipped"
            yield "gradient_exploded", None, norm, large, words

    def _too_few(self, update: PolicyUpdated) -> bool:
        """Whether the rollout is too short for conclusions from its means."""
        return update.head_choices.get("op", 0) < self.limits.min_choices
