"""Scalars of a run under the names that dashboards use, and the step of each.

Names under ``charts/`` and ``losses/`` are CleanRL's; a step is one epoch of one host, as it is one step of one env
there. All values of a round belong to the step at which the round ended.
"""

from __future__ import annotations

from esper.telemetry.event import AnomalyDetected, Event, PolicyUpdated, PracticeRound, RoundCompleted, RunCompleted

LOSSES = {
    "losses/policy_loss": "policy_loss",
    "losses/value_loss": "value_loss",
    "losses/entropy": "entropy",
    "losses/approx_kl": "approx_kl",
    "losses/clipfrac": "clip_fraction",
    "losses/explained_variance": "explained_variance",
    "charts/learning_rate": "learning_rate",
    "ppo/gradient_norm": "gradient_norm",
    "ppo/entropy_coefficient": "entropy_coefficient",
    "ppo/reward_scale": "reward_scale",
    "ppo/minibatches": "minibatches",
    "ppo/skipped_minibatches": "skipped_minibatches",
    "ppo/ratio_max": "ratio_max",
    "ppo/ratio_min": "ratio_min",
}
"""Tag to field of PolicyUpdated."""
ROUND = {
    "charts/episodic_return": "mean_return",
    "charts/SPS": "epochs_per_second",
    "esper/committed_accuracy": "committed_accuracy",
    "esper/baseline_accuracy": "baseline_accuracy",
    "esper/test_accuracy": "test_accuracy",
    "esper/alone_test_accuracy": "alone_test_accuracy",
    "esper/fossils": "fossils",
    "esper/rollbacks": "rollbacks",
    "esper/illegal_actions": "illegal_actions",
    "esper/images_per_second": "images_per_second",
}
"""Tag to field of RoundCompleted."""

KINDS: frozenset[type[Event]] = frozenset((RoundCompleted, PolicyUpdated, PracticeRound, AnomalyDetected, RunCompleted))
"""Events that have scalars."""

PRACTICE = "practice/episodic_return"
"""Tag of practice returns. Their steps are practice rounds, because practice has no env steps of the run."""


class Scalars:
    """Converts events to scalars; ``steps`` is the number of env steps done before the first event."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        self._cut_short = False
        """Whether rounds remain: the comparison of such a run is not final."""

    def of(self, event: Event) -> dict[str, float]:
        """Returns the scalars of ``event`` by tag, at step ``self.steps``; empty for practice, see :data:`PRACTICE`."""
        match event:
            case RoundCompleted():
                self.steps += event.epochs
                self._cut_short = event.round < event.rounds
                return self._round(event)
            case PolicyUpdated():
                losses = _fields(event, LOSSES)
                return {**losses, **{f"entropy/{head}": value for head, value in event.choice_entropies.items()}}
            case AnomalyDetected():
                return {f"anomaly/{event.kind}": event.measured}
            case RunCompleted() if not self._cut_short:
                return {f"comparison/against_{c.reference}": c.difference for c in event.comparisons}
        return {}

    def _round(self, event: RoundCompleted) -> dict[str, float]:
        length = {"charts/episodic_length": event.epochs / event.episodes} if event.episodes else {}
        phases = {f"seconds/{phase}": seconds for phase, seconds in event.phase_seconds.items()}
        memory = {f"memory/{name}": float(held) for name, held in event.memory.items()}
        return {**_fields(event, ROUND), **length, **phases, **memory}


def _fields(event: Event, names: dict[str, str]) -> dict[str, float]:
    """Returns the measured values by tag; fields that are None are left out."""
    values = {tag: getattr(event, field) for tag, field in names.items()}
    return {tag: float(value) for tag, value in values.items() if value is not None}
