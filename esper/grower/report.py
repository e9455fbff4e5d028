"""The report of one step of a Grower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from esper.config import Durations
from esper.grower.env import LoopEnv
from esper.lifecycle.stage import SeedStage
from esper.spaces.action import TEMPOS
from esper.telemetry.event import CAUSES, ActionTaken, Event, GovernorRollback, StageChanged


@dataclass(frozen=True)
class SlotReport:
    """One slot after a step; differences of scores are in the unit of the score, None if they were not measured."""

    path: str
    """The site: a submodule of the model, or two."""
    stage: str
    blueprint: str | None
    parameters: int
    """Number of parameters of the seed, 0 without one."""
    alpha: float
    """Share of the seed in the model's output, 0 to 1."""
    contribution: float | None
    """Score with all seeds minus score without this one; of a kept seed, measured in each epoch only if
    ``config.env.counterfactual_every`` is set."""
    trial: float | None
    """Score with this incubating seed at its target alpha minus score without it."""
    removed: str
    """The last seed that was removed from the slot, with the reason and what was measured of it; empty if none was."""

    @property
    def measured(self) -> str:
        """The trial and the contribution in words; empty if neither was measured."""
        words = []
        if self.trial is not None:
            words.append(f"trial {self.trial:+.3g}")
        if self.contribution is not None:
            words.append(f"contribution {self.contribution:+.3g}")
        return ", ".join(words)


@dataclass(frozen=True)
class GrowthStep:
    """Measurements and actions of :meth:`Grower.step`; as a text, one line that says what happened."""

    epoch: int
    """Number of epochs trained so far."""
    score: float
    """Score of the model with all seeds that are on."""
    committed: float
    """Score of the model with its kept seeds only, which :meth:`Grower.finish` would return."""
    without_seeds: float | None
    """Score of the model as it is now without any seed; a model that leans on them scores lower than one that never
    grew. None while two or more seeds are blended beside kept ones, unless ``config.env.counterfactual_every`` is
    set."""
    action: ActionTaken | None
    """The first action of the controller; None if it waits."""
    changes: tuple[StageChanged, ...]
    """Changes of stages since the last step."""
    slots: Mapping[str, SlotReport]
    rollback: GovernorRollback | None
    """The reason that the governor restored a snapshot, whose scores the others of this report then are; None if it did
    not."""
    done: bool
    """Whether growth is over: after the last epoch, and after ``config.governor.max_rollbacks`` rollbacks."""

    def __str__(self) -> str:
        kept = sum(slot.stage == SeedStage.FOSSILIZED.name for slot in self.slots.values())
        nothing = f"no seed is on trial, {kept} kept"
        happened = "; ".join(self._happened()) or "; ".join(self._waiting()) or nothing
        return f"epoch {self.epoch}: score {self.score:.4g}; {happened}"

    def _happened(self) -> Iterator[str]:
        """Yields what the controller and the governor did in this step."""
        for change in self.changes:
            words = self._words_of(change)
            if words:
                yield words
        if self.action is not None and not self.action.accepted:
            yield f"{self.action.op} in {self.action.slot} is refused: {self.action.reason}"
        if self.rollback is not None:
            yield f"went back to epoch {self.rollback.restored_epoch}: {self.rollback.reason}"

    def _words_of(self, change: StageChanged) -> str:
        """Returns a phrase for a change of stage, or "" if the report leaves that change out."""
        slot = self.slots[change.slot]
        seed = f"{change.blueprint} in {change.slot}"
        if change.before == SeedStage.DORMANT.name:
            planted = f"planted {seed} ({slot.path}), {slot.parameters:,} parameters"
            if change.after == SeedStage.FOSSILIZED.name:
                planted += ", kept at once"
            return planted
        by_stage = {
            SeedStage.BLENDING.name: f"blends in {seed}",
            SeedStage.FOSSILIZED.name: f"kept {seed}{_behind_comma(slot.measured)}",
            SeedStage.PRUNED.name: f"removed from {change.slot}: {slot.removed}",
        }
        return by_stage.get(change.after, "")

    def _waiting(self) -> Iterator[str]:
        """Yields the seeds that are not kept yet."""
        for name, slot in self.slots.items():
            if slot.blueprint is not None and slot.stage != SeedStage.FOSSILIZED.name:
                yield f"{slot.blueprint} in {name} is in {slot.stage}{_behind_comma(slot.measured)}"


def report(
    env: LoopEnv,
    epoch: int,
    points: float,
    events: Sequence[Event],
    before: Mapping[str, SlotReport],
) -> GrowthStep:
    """Returns the report of ``epoch``.

    Args:
        points: percentage points in a unit of the score.
        before: the slots before the controller acted, with what was measured of their seeds.
    """
    state = env.state
    changes = tuple(event for event in events if isinstance(event, StageChanged))
    for change in changes:
        if change.after == SeedStage.PRUNED.name:
            cause = CAUSES.get(change.cause, change.cause)
            measured = _behind_comma(before[change.slot].measured)
            env.note_removed(change.slot, f"{change.blueprint}, {cause}{measured}")
    return GrowthStep(
        epoch=epoch,
        score=float(state.accuracy[0]) / points,
        committed=float(state.committed[0]) / points,
        without_seeds=_known(state.all_off[0], points),
        action=next((event for event in events if isinstance(event, ActionTaken)), None),
        changes=changes,
        slots=slots_of(env, points),
        rollback=next((event for event in events if isinstance(event, GovernorRollback)), None),
        done=bool(env.done[0]),
    )


def slots_of(env: LoopEnv, points: float) -> dict[str, SlotReport]:
    """Returns the present state of each slot."""
    slots = {}
    for s, name in enumerate(env.action_spec.slots):
        slots[name] = _slot(env, s, points)
    return slots


def why_nothing(env: LoopEnv) -> str:
    """Returns a sentence that says why no seed was kept."""
    spec = env.action_spec
    slots = env.state.slots
    reasons = [f"{name} held {words}" for name, words in env.removed.items()]
    for s, name in enumerate(spec.slots):
        if slots.living[0, s]:
            stage = SeedStage(slots.stage[0, s]).name
            blueprint = spec.blueprints[slots.blueprint[0, s]]
            reasons.append(f"{blueprint} in {name} was still in {stage} at the end")
    if not reasons:
        reasons.append(f"none was planted{_too_short(env)}")
    return f"no seed is kept: {'; '.join(reasons)}"


def _too_short(env: LoopEnv) -> str:
    """Returns words for a horizon in which no seed can be tried, blended in and kept; "" for a longer one."""
    epochs = env.config.env.episode_length
    needed = 2 + Durations.of(env.config, epochs).min_training_epochs + min(TEMPOS)
    if epochs >= needed:
        return ""
    return f": a seed that is tried needs {needed} decisions to be kept, and the horizon has {epochs}"


def _slot(env: LoopEnv, s: int, points: float) -> SlotReport:
    slots = env.state.slots
    at = (0, s)
    index = int(slots.blueprint[at])
    name = env.action_spec.slots[s]
    return SlotReport(
        path=str(env.backend.hooks.paths[name]),
        stage=SeedStage(slots.stage[at]).name,
        blueprint=env.action_spec.blueprints[index] if index >= 0 else None,
        parameters=int(slots.parameters[at]),
        alpha=float(slots.alpha_on[at]),
        contribution=_known(slots.contribution[at], points),
        trial=_known(slots.trial[at], points),
        removed=env.removed.get(name, ""),
    )


def _known(value: float, points: float) -> float | None:
    """Returns percentage points in the unit of the score; None for NaN, which was not measured."""
    if np.isnan(value):
        return None
    return float(value) / points


def _behind_comma(words: str) -> str:
    """Returns ``words`` behind a comma; "" for none."""
    return words and f", {words}"
