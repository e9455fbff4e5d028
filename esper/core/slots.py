"""The state of slots and their seeds as arrays over envs E and slots S."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from esper.core.arrays import Bools as Bools
from esper.core.arrays import Floats as Floats
from esper.core.arrays import Ints as Ints
from esper.core.stage import COOLDOWN, LIVING, ON, SeedStage


def stage_table(stages: Collection[SeedStage]) -> Bools:
    """Returns a bool table, indexed by a stage's value, that is True for these stages."""
    table = np.zeros(max(SeedStage) + 1, dtype=np.bool_)
    table[list(stages)] = True
    return table


IS_LIVING = stage_table(LIVING)
IS_ON = stage_table(ON)
IS_COOLING = stage_table(COOLDOWN)
HAS_SEED = stage_table({*LIVING, SeedStage.FOSSILIZED})
IS_RAMPED = stage_table({SeedStage.BLENDING, SeedStage.HOLDING})
"""Stages in which alpha moves by ramps."""

# Metadata of array fields: dtype, initial value, and axes after the leading ones.
INT: dict[str, Any] = {
    "dtype": np.int64,
    "empty": 0,
    "shape": (),
}
FLOAT: dict[str, Any] = {
    "dtype": np.float64,
    "empty": 0.0,
    "shape": (),
}
FLAG: dict[str, Any] = {
    "dtype": np.bool_,
    "empty": False,
    "shape": (),
}
MEASURED: dict[str, Any] = {**FLOAT, "empty": float("nan")}


@dataclass
class Arrays:
    """A dataclass of arrays with the same leading axes."""

    @classmethod
    def fresh(cls, *axes: int, **inner: Arrays) -> Self:
        """Makes arrays with initial values and these leading axes; ``inner`` are the fields that are not arrays."""
        arrays: dict[str, Any] = {}
        for f in fields(cls):
            if f.metadata:
                shape = (*axes, *f.metadata["shape"])
                arrays[f.name] = np.full(shape, f.metadata["empty"], f.metadata["dtype"])
        return cls(**inner, **arrays)

    def clear(self, where: Bools, keep: Collection[str] = ()) -> None:
        """Resets the entries of ``where`` (bool over the leading axes) to initial values, except in fields ``keep``."""
        for f in fields(self):
            if f.metadata and f.name not in keep:
                values = getattr(self, f.name)
                values[where] = f.metadata["empty"]

    def write(self, where: Bools, **values: Any) -> None:
        """Writes each value, an array or a number, into the field of that name at the entries of ``where``."""
        for name, new in values.items():
            np.copyto(getattr(self, name), new, where=where)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the arrays themselves by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata}


@dataclass
class Slots(Arrays):
    """The state of slots and their seeds, [E, S]; NaN for a measurement that was not made."""

    stage: Ints = field(metadata={**INT, "empty": SeedStage.DORMANT})
    epochs_in_stage: Ints = field(metadata=INT)
    age: Ints = field(metadata=INT)
    alpha: Floats = field(metadata=FLOAT)
    alpha_start: Floats = field(metadata=FLOAT)
    alpha_target: Floats = field(metadata=FLOAT)
    alpha_steps: Ints = field(metadata=INT)
    alpha_done: Ints = field(metadata=INT)
    alpha_curve: Ints = field(metadata=INT)
    alpha_velocity: Floats = field(metadata=FLOAT)
    """Change of alpha between the last two ticks, by the ramp or by a jump."""
    alpha_at_tick: Floats = field(metadata=FLOAT)
    incubation_target: Floats = field(metadata=FLOAT)
    """Target alpha of the first ramp, and alpha of trials."""
    tempo: Ints = field(metadata=INT)
    """Steps of the first ramp."""
    fading: Bools = field(metadata=FLAG)
    """True for a pruned seed whose alpha is falling to 0."""
    blueprint: Ints = field(metadata={**INT, "empty": -1})
    """Index into the action spec's blueprints, -1 without a seed."""
    style: Ints = field(metadata=INT)
    parameters: Ints = field(metadata=INT)
    trial: Floats = field(metadata=MEASURED)
    """Accuracy with this incubating seed at its target alpha minus accuracy without it, on the same samples, pp."""
    trial_error: Floats = field(metadata=MEASURED)
    """Paired standard error of ``trial``, pp."""
    contribution: Floats = field(metadata=MEASURED)
    """Accuracy with everything on minus accuracy with this seed's alpha at 0, on the same samples, pp."""
    contribution_error: Floats = field(metadata=MEASURED)
    contribution_change: Floats = field(metadata=FLOAT)
    interaction: Floats = field(metadata=FLOAT)
    """Sum of the pairwise interactions with the other seeds that are on, pp."""
    epochs_since_measured: Ints = field(metadata=INT)
    gradient_norm: Floats = field(metadata=MEASURED)
    gradient_ratio: Floats = field(metadata=MEASURED)
    """(‖g_seed‖/√n_seed) / (‖g_host‖/√n_host + 1e-8), EMA over epochs."""
    gradient_health: Floats = field(metadata=MEASURED)
    vanishing: Floats = field(metadata=MEASURED)
    """Fraction of vanishing gradient tensors, averaged over the epoch's batches."""
    exploding: Floats = field(metadata=MEASURED)
    need: Floats = field(metadata=MEASURED)
    """Last measured need of a vacant slot, in units of the loss, see ``esper.hosts.need``."""
    edited: Bools = field(metadata=FLAG)
    """True if an action chose the slot since the last epoch was trained."""
    gate_score: Floats = field(metadata=FLOAT)
    """Fraction of the next gate's checks that hold; 0 without a gate."""
    gate_passed: Bools = field(metadata=FLAG)
    merges: Ints = field(metadata=INT)
    """Number of seeds of the slot that have become a part of their host's layers in this episode."""
    last_merge: Ints = field(metadata={**INT, "empty": -1})
    """Epoch of the last merge, -1 before it."""
    accuracy_at_merge: Floats = field(metadata=MEASURED)
    """Validation accuracy of the host at the last merge, pp; NaN before it."""
    first_merge: Ints = field(metadata={**INT, "empty": -1})
    """Epoch of the first merge of those whose units are still there, -1 without one."""
    merged_parameters: Ints = field(metadata=INT)
    """Number of parameters that the host has gained by these merges."""
    merged_flops: Floats = field(metadata=FLOAT)
    """Operations of a forward pass, a sample, that it has gained."""

    def empty(self, where: Bools) -> None:
        """Empties the slots of ``where``; what they have grown before stays."""
        self.clear(where, keep=GROWN)

    @property
    def steady(self) -> Bools:
        """True if no ramp of alpha is running."""
        return self.alpha_done >= self.alpha_steps

    @property
    def lowering(self) -> Bools:
        return ~self.steady & (self.alpha_target < self.alpha_start)

    @property
    def living(self) -> Bools:
        return IS_LIVING[self.stage]

    @property
    def occupied(self) -> Bools:
        """True if there is a seed, living or fossil."""
        return HAS_SEED[self.stage]

    @property
    def fossil(self) -> Bools:
        return np.asarray(self.stage == SeedStage.FOSSILIZED)

    @property
    def kept(self) -> Ints:
        """Number of seeds that each host has kept, beside its layers or in them, [E]."""
        return np.asarray((self.fossil + self.merges).sum(axis=1))

    @property
    def added_parameters(self) -> Ints:
        """Number of parameters of all seeds of a host, merged ones included, [E]."""
        return np.asarray((self.parameters + self.merged_parameters).sum(axis=1))

    @property
    def fossil_parameters(self) -> Ints:
        """Number of parameters of all fossils of a host, merged ones included, [E]."""
        of_fossils = np.where(self.fossil, self.parameters, 0)
        return np.asarray((of_fossils + self.merged_parameters).sum(axis=1))

    @property
    def learning(self) -> Bools:
        """True for seeds that train: not in GERMINATED, and not while alpha is falling."""
        return np.asarray(self.occupied & (self.stage != SeedStage.GERMINATED) & ~self.lowering)

    @property
    def alpha_on(self) -> Floats:
        """Alpha of seeds in the forward pass, 0 for other slots."""
        return np.where(IS_ON[self.stage], self.alpha, 0.0)


def mean_need(slots: Slots) -> float | None:
    """Returns the mean of the needs that are known, of all envs; None without any."""
    known = slots.need[~np.isnan(slots.need)]
    if not known.size:
        return None
    return float(known.mean())


GROWN = ("merges", "last_merge", "first_merge", "accuracy_at_merge", "merged_parameters", "merged_flops")
"""Fields of Slots that tell what a slot has grown in its host; they stay when its seed goes, and a rollback restores
them with the layers."""

MEASUREMENTS = (
    "trial",
    "trial_error",
    "contribution",
    "contribution_error",
    "contribution_change",
    "interaction",
    "epochs_since_measured",
    "gradient_norm",
    "gradient_ratio",
    "gradient_health",
    "vanishing",
    "exploding",
)
"""Fields of Slots that are measured of a seed."""
