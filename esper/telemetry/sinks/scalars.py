"""Scalars of a run under the names that dashboards use, and the step of each.

Names under ``charts/`` and ``losses/`` are CleanRL's; a step is one epoch of one host, as it is one step of one env
there. All values of a round belong to the step at which the round ended.
"""

from __future__ import annotations

from esper.telemetry.event import (
    AnomalyDetected,
    Event,
    PolicyUpdated,
    PracticeRound,
    RanksWaited,
    RoundCompleted,
    RunCompleted,
)

TAGS = {
    PolicyUpdated: {
        "losses": "policy_loss value_loss entropy approx_kl explained_variance",
        "ppo": "gradient_norm entropy_coefficient reward_scale minibatches skipped_minibatches ratio_max ratio_min",
        "charts": "learning_rate",
    },
    RoundCompleted: {
        "esper": "committed_accuracy baseline_accuracy test_accuracy alone_test_accuracy fossils rollbacks "
        "illegal_actions images_per_second"
    },
}
"""Fields that are scalars named like themselves, by event and first part of the tag."""
RENAMED = {
    PolicyUpdated: {"losses/clipfrac": "clip_fraction"},
    RoundCompleted: {"charts/episodic_return": "mean_return", "charts/SPS": "epochs_per_second"},
}
"""Other tags and their fields."""
KINDS: frozenset[type[Event]] = frozenset(
    (RoundCompleted, RanksWaited, PolicyUpdated, PracticeRound, AnomalyDetected, RunCompleted)
)
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
                length = {"charts/episodic_length": event.epochs / event.episodes} if event.episodes else {}
                phases = {f"seconds/{phase}": seconds for phase, seconds in event.phase_seconds.items()}
                memory = {f"memory/{name}": float(held) for name, held in event.memory.items()}
                return {**_fields(event), **length, **phases, **memory}
            case PolicyUpdated():
                heads = {f"entropy/{head}": value for head, value in event.choice_entropies.items()}
                return {**_fields(event), **heads}
            case RanksWaited() if event.seconds:
                return {f"ranks/waited_{rank}": share / event.seconds for rank, share in enumerate(event.waited)}
            case AnomalyDetected():
                return {f"anomaly/{event.kind}": event.measured}
            case RunCompleted() if not self._cut_short:
                return {f"comparison/against_{c.reference}": c.difference for c in event.comparisons}
        return {}


def _fields(event: RoundCompleted | PolicyUpdated) -> dict[str, float]:
    """Returns the measured values by tag; fields that are None are left out."""
    tags = {f"{group}/{name}": name for group, names in TAGS[type(event)].items() for name in names.split()}
    values = {tag: getattr(event, field) for tag, field in {**tags, **RENAMED[type(event)]}.items()}
    return {tag: float(value) for tag, value in values.items() if value is not None}
