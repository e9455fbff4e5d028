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

TAGS: dict[type[Event], tuple[str, ...]] = {
    PolicyUpdated: (
        "losses/policy_loss",
        "losses/value_loss",
        "losses/entropy",
        "losses/approx_kl",
        "losses/explained_variance",
        "ppo/gradient_norm",
        "ppo/entropy_coefficient",
        "ppo/reward_scale",
        "ppo/minibatches",
        "ppo/skipped_minibatches",
        "ppo/ratio_max",
        "ppo/ratio_min",
        "charts/learning_rate",
        "losses/clipfrac",
    ),
    RoundCompleted: (
        "esper/committed_accuracy",
        "esper/baseline_accuracy",
        "esper/test_accuracy",
        "esper/alone_test_accuracy",
        "esper/fossils",
        "esper/rollbacks",
        "esper/illegal_actions",
        "esper/images_per_second",
        "charts/episodic_return",
        "charts/SPS",
    ),
}
"""Tags of an event's fields; the last part is the name of the field, unless it is renamed."""
RENAMED = {
    "losses/clipfrac": "clip_fraction",
    "charts/episodic_return": "mean_return",
    "charts/SPS": "epochs_per_second",
}
"""Fields of the other tags."""
KINDS: frozenset[type[Event]] = frozenset(
    (
        RoundCompleted,
        RanksWaited,
        PolicyUpdated,
        PracticeRound,
        AnomalyDetected,
        RunCompleted,
    )
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
                scalars = _fields(event)
                if event.episodes:
                    scalars["charts/episodic_length"] = event.epochs / event.episodes
                for phase, seconds in event.phase_seconds.items():
                    scalars[f"seconds/{phase}"] = seconds
                for name, held in event.memory.items():
                    scalars[f"memory/{name}"] = float(held)
                return scalars
            case PolicyUpdated():
                scalars = _fields(event)
                for head, entropy in event.choice_entropies.items():
                    scalars[f"entropy/{head}"] = entropy
                return scalars
            case RanksWaited() if event.seconds:
                return {f"ranks/waited_{rank}": share / event.seconds for rank, share in enumerate(event.waited)}
            case AnomalyDetected():
                return {f"anomaly/{event.kind}": event.measured}
            case RunCompleted() if not self._cut_short:
                return {f"comparison/against_{c.reference}": c.difference for c in event.comparisons}
        return {}


def _fields(event: RoundCompleted | PolicyUpdated) -> dict[str, float]:
    """Returns the measured values by tag; fields that are None are left out."""
    scalars = {}
    for tag in TAGS[type(event)]:
        _, _, name = tag.partition("/")
        value = getattr(event, RENAMED.get(tag, name))
        if value is not None:  # not measured, or not in an older log
            scalars[tag] = float(value)
    return scalars
