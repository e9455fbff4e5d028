"""The observation: a flat float32 vector whose entries are named here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from esper.core.action import Op
from esper.core.arrays import Float32s, Floats
from esper.core.stage import STAGES

LIMIT = 1e4
"""Values are clamped to ±LIMIT and NaN becomes 0, so observations are finite even if the host is not."""


class FeatureKind(Enum):
    CONTINUOUS = "continuous"
    """Normalised by the agent."""
    FIXED = "fixed"
    """On a scale of its own, that of no host's: the agent reads (value - typical) / spread."""
    FLAG = "flag"
    """0 or 1."""
    INDEX = "index"
    """The index of a name."""


@dataclass(frozen=True)
class Feature:
    """One entry of the observation."""

    name: str
    kind: FeatureKind
    meaning: str
    typical: float = 0.0
    spread: float = 1.0
    """Mean and standard deviation of FIXED entries over hosts of many kinds, roughly."""


HISTORY = 3
"""Number of past epochs whose validation losses and accuracies are kept, for slopes."""
SLOPES = (1, HISTORY)
"""Epochs over which slopes are taken."""

C = FeatureKind.CONTINUOUS
FIXED = FeatureKind.FIXED
FLAG = FeatureKind.FLAG
INDEX = FeatureKind.INDEX

# Chance is the loss of a guess, ln(classes); if that is unknown, the first validation loss takes its place.
BASE: tuple[Feature, ...] = (
    Feature("epoch", C, "epochs done / horizon"),
    # A fraction does not identify the last action if episode lengths differ.
    Feature("epochs_left", C, "symlog of the epochs that are left"),
    Feature("edits_left", C, "decisions other than WAIT that are left before this epoch, fraction"),
    # Known before the first epoch, but for what grows.
    Feature("epochs", FIXED, "log2 of the epochs of the episode, / 10", 0.4, 0.1),
    Feature("updates_left", FIXED, "log2 of 1 + steps of the optimizer that are left, / 10; 0 if unknown", 0.6, 0.2),
    Feature("updates_known", FLAG, "the number of steps in an epoch is known"),
    Feature("samples", FIXED, "log2 of the number of training samples, / 10; 0 if unknown", 0.7, 0.15),
    Feature(
        "samples_per_parameter",
        FIXED,
        "log2 of training samples per parameter of the host, / 10; 0 if unknown",
        -0.1,
        0.2,
    ),
    Feature("samples_known", FLAG, "the number of training samples is known"),
    Feature("host_parameters", FIXED, "log2 of the parameters of the host, merged seeds included, / 10", 0.8, 0.2),
    Feature("first_parameters", FIXED, "log2 of the parameters of the host before it grew, / 10", 0.8, 0.2),
    Feature(
        "host_flops",
        FIXED,
        "log2 of 1 + operations of a forward pass of the first host, a sample, / 20",
        0.6,
        0.15,
    ),
    Feature("inputs", FIXED, "log2 of the numbers in a sample's inputs, / 10; 0 if unknown", 0.5, 0.1),
    Feature("classes", FIXED, "log2 of the number of classes, / 10; 0 for other targets, or if unknown", 0.25, 0.1),
    Feature("chance_known", FLAG, "the loss of a guess is known"),
    Feature("learning_rate", FIXED, "log2 of the first learning rate, / 10; 0 if unknown", -0.4, 0.15),
    Feature("price", FIXED, "symlog of the price of a host's doubling that lasts the whole episode, pp", 1, 0.5),
    # Measured after each epoch.
    Feature("train_loss", C, "symlog of training loss of the epoch / chance; 1 before symlog is a guess"),
    Feature("train_loss_left", C, "symlog of training loss of the epoch / first validation loss"),
    Feature("train_accuracy", C, "training accuracy of the epoch, fraction"),
    Feature("train_measured", FLAG, "training loss and accuracy were measured"),
    Feature("validation_loss", C, "symlog of validation loss / chance"),
    Feature("validation_loss_left", C, "symlog of validation loss / first validation loss"),
    Feature("validation_accuracy", C, "validation accuracy, everything on, fraction"),
    Feature("loss_gap", C, "symlog of (validation minus training loss) / chance"),
    Feature("accuracy_gap", C, "training minus validation accuracy, fraction"),
    *(Feature(f"loss_slope_{n}", C, f"rise of validation loss / chance, per epoch, over {n}, symlog") for n in SLOPES),
    *(Feature(f"accuracy_slope_{n}", C, f"rise of validation accuracy, per epoch, over {n}, fraction") for n in SLOPES),
    Feature("best_accuracy", C, "best validation accuracy of the episode, fraction"),
    Feature("epochs_since_best", C, "epochs since the best / horizon"),
    *(Feature(f"count_{stage.name.lower()}", C, f"slots in {stage.name} / slots") for stage in STAGES),
    *(Feature(f"last_op_{op.name.lower()}", FLAG, f"the last action was {op.name}") for op in Op),
    Feature("gates_passed", C, "slots whose next gate is passed / slots"),
    Feature("last_op_succeeded", FLAG, "the last action was executed, not refused"),
    Feature("rolled_back", FLAG, "the governor rolled back in the last epoch"),
    Feature("added_parameters", C, "parameters of all seeds / budget"),
    Feature("fossil_parameters", C, "parameters of fossils / budget"),
    Feature("added_flops", C, "ln(1 + operations of all seeds / those of the first host)"),
    Feature("rent", C, "rent paid this epoch, times the horizon"),
    Feature("seeds_left", C, "seeds left under the cap / cap"),
    Feature("committed_accuracy", C, "validation accuracy with fossils only, fraction"),
    Feature("committed_loss", C, "symlog of validation loss with fossils only / chance"),
    Feature("all_off_accuracy", C, "validation accuracy with every seed off, fraction"),
    Feature("all_off_loss", C, "symlog of validation loss with every seed off / chance"),
    Feature("rollbacks", C, "rollbacks used / allowed"),
    Feature("anomaly_pending", FLAG, "the governor saw an anomaly in the last check"),
)

PER_SLOT: tuple[Feature, ...] = (
    *(Feature(f"stage_{stage.name.lower()}", FLAG, f"the slot is {stage.name}") for stage in STAGES),
    Feature("alpha", C, "alpha now"),
    Feature("alpha_target", C, "where alpha is going"),
    Feature("alpha_mode", C, "-1 falling, 0 holding, 1 rising"),
    Feature("alpha_progress", C, "how much of the ramp is done, fraction"),
    Feature("alpha_velocity", C, "change of alpha in the last epoch"),
    Feature("incubation_target", C, "target alpha of the trial and of the first ramp"),
    Feature("trial", C, "trial accuracy of an incubating seed minus without it, clamped to 10 pp, / 10"),
    Feature("trial_error", C, "paired standard error of the trial, pp / 10"),
    Feature("contribution", C, "accuracy with the seed minus without it, clamped to 10 pp, / 10"),
    Feature("contribution_change", C, "change of the contribution since it was last measured, pp / 10"),
    Feature("contribution_error", C, "paired standard error of the contribution, pp / 10"),
    Feature("contribution_measured", FLAG, "the contribution was measured for this seed"),
    Feature("epochs_since_measured", C, "epochs since the contribution was measured / horizon"),
    Feature("interaction", C, "summed interaction with the other seeds that are on, clamped to 10 pp, / 10"),
    Feature("gradient_norm", C, "symlog of the seed's gradient norm"),
    Feature("gradient_ratio", C, "symlog of the seed's to the host's gradient, per element"),
    Feature("gradient_health", C, "0 to 1"),
    Feature("vanishing", C, "fraction of vanishing gradient tensors"),
    Feature("exploding", C, "fraction of exploding gradient tensors"),
    Feature("epochs_in_stage", C, "epochs in this stage / horizon"),
    Feature("age", C, "epochs since germination / horizon"),
    Feature("parameters", C, "ln(1 + parameters of the seed) / 10"),
    Feature("flops", C, "ln(1 + operations of the seed / those of the host)"),
    Feature("gate_score", C, "fraction of the next gate's checks that hold"),
    Feature("gate_passed", FLAG, "the next gate would open"),
    Feature("fading", FLAG, "the seed is being removed"),
    Feature(
        "width",
        FIXED,
        "log2 of the units of the layer that grows here, of other places of the channels, / 10",
        0.25,
        0.15,
    ),
    Feature("width_ratio", FIXED, "log2 of that width / the one before the host grew"),
    Feature("need", C, "need / chance, when last measured"),
    Feature("need_measured", FLAG, "need was measured here"),
    Feature("merges", C, "log2 of 1 + seeds that became a part of the host here"),
    Feature("since_merge", C, "epochs since the last of them did / horizon; 0 without any"),
    Feature("merge_gain", C, "validation accuracy minus that at the last merge, clamped to 10 pp, / 10; 0 without any"),
    Feature("blueprint", INDEX, "0 for none, else 1 + the blueprint's index"),
)

PER_CHOICE: tuple[Feature, ...] = (
    Feature(
        "price",
        FIXED,
        "symlog of what the reward takes for such a seed in a whole episode, pp of final accuracy",
        1,
        0.5,
    ),
    Feature("size", C, "ln(1 + parameters of such a seed) / 10"),
    Feature("size_share", C, "ln(1 + parameters of such a seed / parameters of the host)"),
    Feature("flops_share", C, "ln(1 + operations of such a seed / those of the host)"),
    Feature("layers", C, "weight matrices and kernels of the blueprint / 4"),
    Feature("spatial", C, "fraction of its parameters in kernels of more than one position"),
    Feature("elementwise", C, "fraction of its parameters in vectors, as in a normalisation"),
    Feature("reads_source", FLAG, "it reads earlier features than those to which it adds"),
    Feature("zero_at_birth", FLAG, "a new one changes nothing"),
    Feature("at_once", FLAG, "it is a part of its host in the epoch in which it is planted"),
)
"""Entries of each (slot, blueprint), a seed that could be planted."""
KINDS = (
    "layers",
    "spatial",
    "elementwise",
    "reads_source",
    "zero_at_birth",
    "at_once",
)
"""Entries that describe a blueprint by what it is built of and how it begins."""


def symlog(x: Floats | float) -> Floats:
    """sign(x) · ln(1 + |x|): keeps small values and compresses large ones."""
    return np.copysign(np.log1p(np.abs(x)), x)


def clamp_pp(x: Floats | float | None) -> Floats:
    """Clamps percentage points to ±10 and divides by 10; 0 if not measured (NaN or None)."""
    known = np.nan_to_num(
        np.asarray(x, dtype=np.float64),
        nan=0.0,
        posinf=10.0,
        neginf=-10.0,
    )
    return np.asarray(np.clip(known, -10.0, 10.0) / 10)


@dataclass(frozen=True)
class ObservationLayout:
    """Names and positions of the entries for a host with these slots (row-major), blueprints and horizon (epochs).

    First come the entries of the host, then those of each slot, then those of each (slot, blueprint).
    """

    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    horizon: int

    @cached_property
    def entries(self) -> tuple[Feature, ...]:
        # The order is that of the vectors, see the class.
        entries = [*BASE]
        for slot in self.slots:
            entries += _named_after(slot, PER_SLOT)
        for slot in self.slots:
            for blueprint in self.blueprints:
                entries += _named_after(f"{slot}/{blueprint}", PER_CHOICE)
        return tuple(entries)

    @cached_property
    def index(self) -> Mapping[str, int]:
        return {entry.name: place for place, entry in enumerate(self.entries)}

    @property
    def size(self) -> int:
        of_slot = len(PER_SLOT) + len(self.blueprints) * len(PER_CHOICE)
        return len(BASE) + len(self.slots) * of_slot

    def vectors(
        self,
        base: Mapping[str, Any],
        per_slot: Mapping[str, Any],
        per_choice: Mapping[str, Any],
    ) -> Float32s:
        """Builds observations, float32 [E, size], from values by name.

        ``base`` are [E], ``per_slot`` [E, S], and ``per_choice`` [E, S, B] or broadcast to that.

        The result is always finite. Raises KeyError if a name is missing.
        """
        shape = (len(base["epoch"]), len(self.slots), len(self.blueprints))
        parts = (
            _entries(BASE, base, shape[:1]),
            _entries(PER_SLOT, per_slot, shape[:2]),
            _entries(PER_CHOICE, per_choice, shape),
        )
        vectors = np.concatenate(parts, axis=1)
        # Clipping would leave NaN.
        finite = np.nan_to_num(vectors, nan=0.0, posinf=LIMIT, neginf=-LIMIT)
        return np.clip(finite, -LIMIT, LIMIT).astype(np.float32)

    def read(self, observation: Float32s, name: str) -> Float32s:
        """Returns one entry [...] of observations [..., size]. Raises KeyError if the layout has no such name."""
        return observation[..., self.index[name]]


def _entries(
    features: tuple[Feature, ...],
    values: Mapping[str, Any],
    shape: tuple[int, ...],
) -> Floats:
    """Returns the values of ``features`` by name, each of ``shape`` [E, ...] or broadcast to that, float64 [E, ·]."""
    entries = np.empty((*shape, len(features)))
    for place, feature in enumerate(features):
        entries[..., place] = values[feature.name]  # what is missing is a KeyError: no entry stays empty
    return entries.reshape(shape[0], -1)


def _named_after(place: str, features: tuple[Feature, ...]) -> list[Feature]:
    """Returns the features of a slot or a choice under the names that they have in the whole vector."""
    return [replace(feature, name=f"{place}/{feature.name}") for feature in features]


def split(observation: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits observations [..., size] of hosts with S slots into entries by what they describe.

    Returns those of the host [..., BASE], of its slots [..., S, PER_SLOT], and of the seeds that could be planted
    [..., S, B, PER_CHOICE].
    """
    lead = observation.shape[:-1]
    first_slot = len(BASE)
    first_choice = first_slot + slots * len(PER_SLOT)
    base = observation[..., :first_slot]
    per_slot = observation[..., first_slot:first_choice].reshape(*lead, slots, len(PER_SLOT))
    per_choice = observation[..., first_choice:].reshape(*lead, slots, -1, len(PER_CHOICE))
    return base, per_slot, per_choice
