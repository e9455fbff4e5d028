"""Lifecycles of the slots of every host: which seed was in which stage, from when to when."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from esper.report.read import Run
from esper.telemetry.event import EpochCompleted, GovernorRollback, RunStarted, StageChanged

STAGES = {
    "GERMINATED": "planted, not trained yet",
    "TRAINING": "incubated beside the host",
    "BLENDING": "its alpha is changing",
    "HOLDING": "fully blended, not kept yet",
    "FOSSILIZED": "kept for good",
    "PRUNED": "removed",
    "EMBARGOED": "the slot rests",
    "RESETTING": "the slot is almost free again",
}
"""Meaning of each stage in which a slot is not free."""


@dataclass(frozen=True)
class Stretch:
    """A seed in one stage, from one epoch to another."""

    slot: str
    stage: str
    blueprint: str | None
    begin: int
    end: int
    cause: str


@dataclass(frozen=True)
class Life:
    """Everything that happened in the slots of one host."""

    episode: int
    env: int
    end: int
    """Number of epochs done so far."""
    stretches: list[Stretch]
    """By slot, in the order of time."""
    rollbacks: list[int]

    def words(self) -> str:
        """Describes the lifecycles for readers who cannot see the chart."""
        events = [
            f"{s.slot}: {s.blueprint or 'seed'} {s.stage.lower()} from epoch {s.begin} to {s.end}"
            for s in self.stretches
        ]
        events += [f"rollback at epoch {epoch}" for epoch in self.rollbacks]
        return f"host {self.env}: " + ("; ".join(events) or "no seed was planted")


def lives(run: Run) -> list[Life]:
    """Returns the slot lifecycles of every host, by round and env."""
    ends: Counter[tuple[int, int]] = Counter()
    changes: dict[tuple[int, int], list[StageChanged]] = defaultdict(list)
    rollbacks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in (*run.of(EpochCompleted), *run.of(StageChanged)):
        ends[event.episode, event.env] = max(ends[event.episode, event.env], event.epoch)
    for change in run.of(StageChanged):
        changes[change.episode, change.env].append(change)
    for rollback in run.of(GovernorRollback):
        rollbacks[rollback.episode, rollback.env].append(rollback.epoch)
    return [Life(*key, end, _stretches(changes[key], end), rollbacks[key]) for key, end in sorted(ends.items())]


def _stretches(changes: Sequence[StageChanged], end: int) -> list[Stretch]:
    """Returns the stretches between changes of a slot; those shorter than an epoch are kept with length 0."""
    by_slot: dict[str, list[StageChanged]] = defaultdict(list)
    for change in changes:
        by_slot[change.slot].append(change)
    return [
        Stretch(slot, change.after, change.blueprint, change.epoch, until, change.cause)
        for slot, own in by_slot.items()
        for change, until in zip(own, [*(later.epoch for later in own[1:]), end], strict=True)
        if change.after != "DORMANT"
    ]


def slots_of(run: Run) -> list[str]:
    """Returns the slots in the host's order, or sorted by name if the start of the run is not logged."""
    started = run.last(RunStarted)
    named = list(started.slots) if started else []
    return named + sorted({change.slot for change in run.of(StageChanged)} - set(named))
