"""The report of one step of a Grower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from esper.grower.env import LoopEnv
from esper.lifecycle.stage import SeedStage
from esper.telemetry.event import ActionTaken, Event, GovernorRollback, StageChanged


@dataclass(frozen=True)
class SlotReport:
    """One slot after a step; differences of scores are in the unit of the score, None if they were not measured."""

    stage: str
    blueprint: str | None
    alpha: float
    """Share of the seed in the model's output, 0 to 1."""
    contribution: float | None
    """Score with all seeds minus score without this one."""
    trial: float | None
    """Score with this incubating seed at its target alpha minus score without it."""


@dataclass(frozen=True)
class GrowthStep:
    """Measurements and actions of :meth:`Grower.step`."""

    epoch: int
    """Number of epochs trained so far."""
    score: float
    """Score of the model with all seeds that are on."""
    committed: float
    """Score of the model with its kept seeds only, which :meth:`Grower.finish` would return."""
    without_seeds: float
    """Score of the model as it is now without any seed; a model that leans on them scores lower than one that never
    grew."""
    action: ActionTaken | None
    """The action of the controller; None if it waits."""
    changes: tuple[StageChanged, ...]
    """Changes of stages since the last step."""
    slots: Mapping[str, SlotReport]
    rollback: GovernorRollback | None
    """The reason that the governor restored a snapshot, whose scores the others of this report then are; None if it did
    not."""
    done: bool
    """Whether growth is over: after the last epoch, and after ``config.governor.max_rollbacks`` rollbacks."""


def report(env: LoopEnv, epoch: int, points: float, events: Sequence[Event]) -> GrowthStep:
    """Returns the report of ``epoch``; ``points`` are the percentage points in a unit of the score."""
    state = env.state
    return GrowthStep(
        epoch=epoch,
        score=float(state.accuracy[0]) / points,
        committed=float(state.committed[0]) / points,
        without_seeds=float(state.all_off[0]) / points,
        action=next((event for event in events if isinstance(event, ActionTaken)), None),
        changes=tuple(event for event in events if isinstance(event, StageChanged)),
        slots={name: _slot(env, s, points) for s, name in enumerate(env.action_spec.slots)},
        rollback=next((event for event in events if isinstance(event, GovernorRollback)), None),
        done=bool(env.done[0]),
    )


def _slot(env: LoopEnv, s: int, points: float) -> SlotReport:
    slots, at = env.state.slots, (0, s)
    index = int(slots.blueprint[at])
    contribution, trial = (
        None if np.isnan(values[at]) else float(values[at]) / points for values in (slots.contribution, slots.trial)
    )
    return SlotReport(
        stage=SeedStage(slots.stage[at]).name,
        blueprint=env.action_spec.blueprints[index] if index >= 0 else None,
        alpha=float(slots.alpha_on[at]),
        contribution=contribution,
        trial=trial,
    )
