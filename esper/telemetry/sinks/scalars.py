"""The numbers of a run by the names that dashboards know, and the step each belongs to.

The names of ``charts/`` and ``losses/`` are those of CleanRL; a step is an epoch of one host, as there it is a step of
one env. Everything of a round belongs to the step that the round ended in.
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
"""Tag, and the field of PolicyUpdated."""
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
"""Tag, and the field of RoundCompleted."""

KINDS: frozenset[type[Event]] = frozenset((RoundCompleted, PolicyUpdated, PracticeRound, AnomalyDetected, RunCompleted))
"""Events that have such numbers."""

PRACTICE = "practice/episodic_return"
"""By rounds of practice, which have no env steps of the run."""


class Scalars:
    """Turns events into numbers; ``steps`` are the env steps that were done before the first of them."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        self._cut_short = False
        """Whether rounds are still to come: what such a run compares is not what it ends with."""

    def of(self, event: Event) -> dict[str, float]:
        """The numbers of ``event`` by tag, at the step ``self.steps``; practice has none, see :data:`PRACTICE`."""
        match event:
            case RoundCompleted():
                self.steps += event.epochs
                self._cut_short = event.round < event.rounds
                return self._round(event)
            case PolicyUpdated():
                told = _fields(event, LOSSES)
                return {**told, **{f"entropy/{head}": value for head, value in event.choice_entropies.items()}}
            case AnomalyDetected():
                return {f"anomaly/{event.kind}": event.measured}
            case RunCompleted() if not self._cut_short:
                return {f"comparison/against_{found.reference}": found.difference for found in event.comparisons}
        return {}

    def _round(self, event: RoundCompleted) -> dict[str, float]:
        length = {"charts/episodic_length": event.epochs / event.episodes} if event.episodes else {}
        phases = {f"seconds/{phase}": seconds for phase, seconds in event.phase_seconds.items()}
        memory = {f"memory/{name}": float(held) for name, held in event.memory.items()}
        return {**_fields(event, ROUND), **length, **phases, **memory}


def _fields(event: Event, names: dict[str, str]) -> dict[str, float]:
    """What was not measured is left out."""
    found = {tag: getattr(event, field) for tag, field in names.items()}
    return {tag: float(value) for tag, value in found.items() if value is not None}
