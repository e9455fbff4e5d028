"""The scores that one step of a Grower reads, and its report."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.core.stage import SeedStage
from esper.core.units import units_in
from esper.grower.record import LoopRecord
from esper.telemetry.event import ActionTaken, GovernorRollback, StageChanged
from esper.telemetry.text import count
from esper.training.metrics import HOST, GradientSummary

if TYPE_CHECKING:
    from esper.grower.env import LoopEnv


Evaluate = Callable[[nn.Module], Any]
"""Maps the model to a score (higher is better), to scores [n] of samples, or to ``(score or scores, mean loss)``."""

MAX_POINTS = 200.0
"""Max absolute score in pp; a larger one is a score in another unit."""
FORMS = "a number, the scores [n] of n >= 2 samples, or a tuple (score or scores, loss)"

MAX_NOISE = 0.01
"""Difference of two scores of one network, in percentage points, that is not mentioned."""

MAX_RATIO = 1000.0
"""Ratio of a seed's gradients to the host's, both per element, that is not mentioned; scales begin at 65,536."""


@dataclass(frozen=True)
class Score:
    """One validation of one network."""

    samples: NDArray[np.float64]
    """Scores of the samples, [n]; of a single score, two equal ones, so that a paired difference has no error."""
    loss: float | None

    @property
    def mean(self) -> float:
        return float(self.samples.mean())

    def loss_at(self, points: float) -> float:
        """Returns the loss. Without one, what is missing to 100 pp counts, in units of one.

        ``points`` are the percentage points in one unit of the score.
        """
        if self.loss is not None:
            return self.loss
        return 1 - self.mean * points / 100


def read_score(result: object, epoch: int, finite: bool = True) -> Score:
    """Reads the result of ``evaluate`` after ``epoch`` epochs.

    Raises:
        TypeError: it has none of the forms that ``Evaluate`` describes.
        ValueError: a score is not finite; never if ``finite`` is False.
    """
    loss = None
    if isinstance(result, list) and len(result) == 2:
        raise TypeError("evaluate returned a list of two; return a tuple (score or scores, loss), or an array")
    if isinstance(result, tuple):
        if len(result) != 2:
            raise TypeError(f"evaluate returned a tuple of {len(result)}; return {FORMS}")
        result, losses = result
        loss = float(_numbers(losses).mean())
    samples = _numbers(result)
    if samples.ndim > 1 or (samples.ndim == 1 and len(samples) < 2):
        raise TypeError(f"evaluate returned an array of shape {list(samples.shape)}; return {FORMS}")
    if finite and not np.isfinite(samples).all():
        raise ValueError(
            f"epoch {epoch}: evaluate returned a score that is not finite ({samples[~np.isfinite(samples)][0]}); "
            "the model has diverged, or the score is undefined for it"
        )
    return Score(samples if samples.ndim else np.repeat(samples, 2), loss)


def warning_of_unit(mean: float, points: float) -> str | None:
    """Words a warning about a score that is far more than 100 percentage points; None for any other score.

    ``points`` are the percentage points in one unit of the score.
    """
    if not math.isfinite(mean) or abs(mean * points) <= MAX_POINTS:
        return None
    fitting = 10.0 ** math.floor(math.log10(100 / abs(mean)))
    return (
        f"evaluate returned {mean:g}, which is {mean * points:g} percentage points at points={points:g}. Gates and "
        f"controllers expect scores that span about 100 of them: if scores stay like this, pass points={fitting:g}; if "
        "this one is an exception, such as R² before training, nothing is to be done"
    )


def _numbers(value: object) -> NDArray[np.float64]:
    try:
        if isinstance(value, Tensor):
            value = value.detach().to("cpu", torch.float64).numpy()
        if value is not None and np.asarray(value).dtype.kind in "biufO":  # it reads None as NaN, and digits in texts
            return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"evaluate returned {type(value).__name__}; return {FORMS}")


class LoopWarnings:
    """Warns once of scores and gradients that are probably not what the user meant."""

    def __init__(self, points: float) -> None:
        self.points = points
        self.repeated = False
        """Whether one network has been scored twice, which shows the noise in scores."""
        self._said: set[str] = set()

    def of_unit(self, mean: float) -> None:
        """Warns if scores have another unit than ``points`` says."""
        words = warning_of_unit(mean, self.points)
        if words is not None:
            self._say("unit", words)

    def of_noise(self, first: Score, again: Score) -> None:
        """Warns if ``evaluate`` has returned two scores for one network."""
        self.repeated = True
        noise = abs(first.mean - again.mean)
        if noise * self.points > MAX_NOISE:
            self._say(
                "noise",
                f"evaluate returned {first.mean:g}, and then {again.mean:g} for the same network: differences between "
                "networks that are not larger are noise. Score all of them on the same samples, in eval mode",
            )

    def of_scale(self, summaries: dict[str, GradientSummary]) -> None:
        """Warns if a seed has gradients as large as those of a scaled loss."""
        for name, summary in summaries.items():
            host = summaries[HOST]
            if name != HOST and host.norm > 0 and summary.ratio_to(host) > MAX_RATIO:
                self._say(
                    "scale",
                    f"the gradients of the seed in slot {name} are {summary.ratio_to(host):.3g} times those of the "
                    "model: if a GradScaler scales the loss, pass it to the Grower as scaler=",
                )

    def _say(self, kind: str, words: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(words, stacklevel=7)


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
    units: tuple[int, int] | None
    """Units of the layer before and with this widening; None for other seeds."""
    removed: str
    """The last seed that was removed from the slot, with the reason and what was measured of it; empty if none was."""
    merges: int = 0
    """Number of seeds of the slot that have become a part of the layers."""
    stays: str = ""
    """The reason why a kept seed stays beside the layers; empty if it was not tried."""

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
    units: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Units of layers before and with the widenings that were planted, by slot."""

    def __repr__(self) -> str:
        return f"GrowthStep({self})"

    def __str__(self) -> str:
        happened = "; ".join(self._happened()) or "; ".join(self._waiting()) or self._settled()
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
        if change.cause == "merged":
            return f"merged {seed} into its layers"
        units = self.units.get(change.slot)
        if units is not None:
            seed += f", {units[0]:,} -> {units[1]:,} units"
        if change.before == SeedStage.DORMANT.name:
            planted = f"planted {seed}"
            if slot.path != change.slot:
                planted += f" ({slot.path})"
            if slot.parameters:  # none of those that are in their layers already
                planted += f", {slot.parameters:,} parameters"
            if change.after == SeedStage.FOSSILIZED.name:
                planted += ", kept at once"
            return planted
        by_stage = {
            SeedStage.BLENDING.name: f"blends in {seed}",
            SeedStage.FOSSILIZED.name: f"kept {seed}{_behind_comma(slot.measured)}",
            SeedStage.PRUNED.name: f"removed from {change.slot}: {slot.removed}",
        }
        return by_stage.get(change.after, "")

    def _settled(self) -> str:
        """Returns words for a step in which nothing happens or is about to."""
        kept = sum(slot.stage == SeedStage.FOSSILIZED.name for slot in self.slots.values())
        merged = sum(slot.merges for slot in self.slots.values())
        words = "nothing on trial"
        if merged:
            words += f", {count(merged, 'seed')} merged"
        if kept:
            words += f", {count(kept, 'seed')} kept"
        return words

    def _waiting(self) -> Iterator[str]:
        """Yields the seeds that are not kept yet."""
        for name, slot in self.slots.items():
            if slot.blueprint is not None and slot.stage != SeedStage.FOSSILIZED.name:
                yield f"{slot.blueprint} in {name} is in {slot.stage}{_behind_comma(slot.measured)}"


def report(
    env: LoopEnv,
    epoch: int,
    record: LoopRecord,
    before: Mapping[str, SlotReport],
) -> GrowthStep:
    """Returns the report of ``epoch``.

    Args:
        record: the events of the step, and the seeds, which get what the report knows of them.
        before: the slots before the controller acted, with what was measured of their seeds.
    """
    state = env.state
    life = record.life
    events = record.take()
    points = env.backend.points
    record.scores.append(float(state.accuracy[0]) / points)
    for name, slot in before.items():
        seed = life.newest(name)
        if seed is not None and slot.trial is not None:
            seed.trial = points * slot.trial
    units = {record.names[slot]: of_layer for slot, of_layer in env.planted_units.items()}
    for name, of_layer in units.items():
        seed = life.newest(name)
        if seed is not None and seed.units is None:
            seed.units = of_layer
    return GrowthStep(
        epoch=epoch,
        score=float(state.accuracy[0]) / points,
        committed=float(state.committed[0]) / points,
        without_seeds=_known(state.all_off[0], points),
        action=next((event for event in events if isinstance(event, ActionTaken)), None),
        changes=tuple(event for event in events if isinstance(event, StageChanged)),
        slots=slots_of(env, record),
        units=units,
        rollback=next((event for event in events if isinstance(event, GovernorRollback)), None),
        done=bool(env.done[0]),
    )


def slots_of(env: LoopEnv, record: LoopRecord) -> dict[str, SlotReport]:
    """Returns the present state of each slot."""
    slots = {}
    for s, slot in enumerate(env.action_spec.slots):
        name = record.names[slot]
        removed = [seed for seed in record.life.seeds if seed.slot == name and seed.removed]
        words = ""
        if removed:
            gone = removed[-1]
            measured = gone.measured(env.score_unit)
            words = f"{gone.blueprint}, {gone.removed}{measured}"
        slots[name] = _slot(env, s, words)
    return slots


def _slot(env: LoopEnv, s: int, removed: str) -> SlotReport:
    slots = env.state.slots
    at = (0, s)
    points = env.backend.points
    index = int(slots.blueprint[at])
    site = env.backend.sites[s]
    seed = site.planted
    return SlotReport(
        path=str(env.backend.hooks.paths[env.action_spec.slots[s]]),
        stage=SeedStage(slots.stage[at]).name,
        blueprint=env.action_spec.blueprints[index] if index >= 0 else None,
        parameters=int(slots.parameters[at]),
        alpha=float(slots.alpha_on[at]),
        contribution=_known(slots.contribution[at], points),
        trial=_known(slots.trial[at], points),
        units=units_in(site),
        removed=removed,
        merges=int(slots.merges[at]),
        stays="" if seed is None else seed.stays,
    )


def _known(value: float, points: float) -> float | None:
    """Returns percentage points in the unit of the score; None for NaN, which was not measured."""
    if np.isnan(value):
        return None
    return float(value) / points


def _behind_comma(words: str) -> str:
    """Returns ``words`` behind a comma; "" for none."""
    return words and f", {words}"
