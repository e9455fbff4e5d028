"""Typed events: what a run says about itself.

Every event is a frozen dataclass. A field marked with :func:`volatile` may differ between two runs of the same seed
(clock times, durations, paths); all others are the same, bit for bit, on the same CPU.

Accuracies are percentages (pp, 0 to 100), losses are natural-log cross-entropy, times are seconds.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 1


def volatile() -> Any:
    """A dataclass field whose value may differ between two runs of the same seed."""
    return dataclasses.field(metadata={"volatile": True})


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; its class name is the event's name in the log."""


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    task: str
    controller: str
    seed: int
    rounds: int
    n_envs: int
    episode_length: int
    host_parameters: int
    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    time: float = volatile()
    folder: str = volatile()


@dataclass(frozen=True, slots=True)
class BaselineMeasured(Event):
    """The no-growth curves of the run: means over ``episodes`` hosts left alone, by epochs done (0: untrained)."""

    episodes: int
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    final_loss_std: float


@dataclass(frozen=True, slots=True)
class ActionTaken(Event):
    """One action with its outcome; WAIT is not reported."""

    env: int
    episode: int
    epoch: int
    op: str
    slot: str | None
    blueprint: str | None
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class GateEvaluated(Event):
    """A gate's answer when a transition was asked for; checks are (name, held, measured value, threshold)."""

    env: int
    episode: int
    epoch: int
    slot: str
    gate: str
    passed: bool
    score: float
    checks: tuple[tuple[str, bool, float | None, float | None], ...]


@dataclass(frozen=True, slots=True)
class StageChanged(Event):
    env: int
    episode: int
    epoch: int
    slot: str
    blueprint: str | None
    before: str
    after: str
    cause: str


@dataclass(frozen=True, slots=True)
class SeedCut(Event):
    """A living seed became non-finite and was removed without a rollback."""

    env: int
    episode: int
    epoch: int
    slot: str
    blueprint: str


@dataclass(frozen=True, slots=True)
class GovernorRollback(Event):
    env: int
    episode: int
    epoch: int
    reason: str
    value: float
    threshold: float
    restored_epoch: int
    rollbacks: int


@dataclass(frozen=True, slots=True)
class EpochCompleted(Event):
    """One env's epoch after the governor: what the controller sees and is paid for."""

    env: int
    episode: int
    epoch: int
    train_loss: float
    train_accuracy: float
    validation_loss: float
    validation_accuracy: float
    committed_accuracy: float
    baseline_accuracy: float
    parameters: int
    fossil_parameters: int
    contributions: dict[str, float]
    stages: dict[str, str]
    reward: float
    reward_terms: dict[str, float]


@dataclass(frozen=True, slots=True)
class EpisodeCompleted(Event):
    env: int
    episode: int
    epochs: int
    total_reward: float
    validation_accuracy: float
    committed_accuracy: float
    baseline_accuracy: float
    host_parameters: int
    fossil_parameters: int
    fossils: dict[str, str]
    rollbacks: int
    terminated: bool


@dataclass(frozen=True, slots=True)
class RoundCompleted(Event):
    """One round, counted from 1; means are over its hosts, ``fossils`` is the mean number a host.

    ``committed_accuracy`` is that of committed networks on validation images, the other two on test images: of the
    grown hosts, and of the same hosts left alone.
    ``seconds`` is this round's, twins included; ``images_per_second`` counts the grown hosts' training samples only.
    """

    round: int
    rounds: int
    episodes: int
    mean_return: float
    committed_accuracy: float
    test_accuracy: float
    alone_test_accuracy: float
    fossils: float
    rollbacks: int
    illegal_actions: int
    samples: int
    seconds: float = volatile()
    images_per_second: float = volatile()
    phase_seconds: dict[str, float] = volatile()  # noqa: RUF009  a field, not a default


@dataclass(frozen=True, slots=True)
class RunCompleted(Event):
    """The paired end of a run: test accuracy of the grown hosts and of the same hosts left alone."""

    grown_accuracy: float
    alone_accuracy: float
    difference: float
    low: float
    high: float
    pairs: int
    host_parameters: int
    grown_parameters: float
    seconds: float = volatile()


def record(event: Event) -> dict[str, Any]:
    """The event as a JSON-ready dict: "event" (its name), "schema", and its fields; non-finite floats as strings."""
    return {"event": type(event).__name__, "schema": SCHEMA_VERSION, **plain(dataclasses.asdict(event))}


def stable_record(event: Event) -> dict[str, Any]:
    """``record`` without the volatile fields: equal for two runs of the same seed."""
    fields = record(event)
    for field in dataclasses.fields(event):
        if field.metadata.get("volatile"):
            del fields[field.name]
    return fields


def plain(value: Any) -> Any:
    """JSON has no NaN or infinity: write them as strings, so that the log stays readable by every parser."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
