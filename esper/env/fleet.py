"""The state of many envs as arrays, from which masks, observations and rewards are computed.

Training hosts are gathered into a fleet after each step; a simulated env keeps its state in one. E envs, S slots.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import Durations
from esper.config_resolved import ResolvedConfig
from esper.env.baseline import Baseline
from esper.rewards.terms import RewardState, SlotState
from esper.seeds.stage import BLENDED, COOLDOWN, LIVING, SeedStage
from esper.spaces.action import ActionSpec
from esper.spaces.observation import HISTORY

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def stage_table(stages: Collection[SeedStage]) -> Bools:
    """Returns a bool table, indexed by a stage's value, that is True for these stages."""
    table = np.zeros(max(SeedStage) + 1, dtype=np.bool_)
    table[list(stages)] = True
    return table


IS_LIVING, IS_BLENDED, IS_COOLING = stage_table(LIVING), stage_table(BLENDED), stage_table(COOLDOWN)
HAS_SEED = stage_table({*LIVING, SeedStage.FOSSILIZED})


NAN = float("nan")

# Metadata of array fields: dtype, initial value, and axes after the leading ones.
INT: dict[str, Any] = {"kind": np.int64, "empty": 0, "shape": ()}
FLOAT: dict[str, Any] = {"kind": np.float64, "empty": 0.0, "shape": ()}
FLAG: dict[str, Any] = {"kind": np.bool_, "empty": False, "shape": ()}
MEASURED: dict[str, Any] = {**FLOAT, "empty": NAN}


@dataclass
class Arrays:
    """A dataclass of arrays with the same leading axes."""

    @classmethod
    def fresh(cls, *axes: int, **given: Arrays) -> Self:
        """Makes arrays with initial values and these leading axes; ``given`` are the fields that are not arrays."""
        kinds = {f.name: f.metadata for f in fields(cls) if f.metadata}
        made: dict[str, Any] = {name: np.full((*axes, *m["shape"]), m["empty"], m["kind"]) for name, m in kinds.items()}
        return cls(**given, **made)

    def clear(self, where: Bools, keep: Collection[str] = ()) -> None:
        """Resets the entries of ``where`` (bool over the leading axes) to initial values, except in fields ``keep``."""
        for f in fields(self):
            if f.metadata and f.name not in keep:
                getattr(self, f.name)[where] = f.metadata["empty"]

    def state_dict(self) -> dict[str, Tensor]:
        """Returns copies of the arrays by name, as tensors."""
        return {f.name: torch.from_numpy(getattr(self, f.name).copy()) for f in fields(self) if f.metadata}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Overwrites the arrays in place."""
        for name, values in state.items():
            getattr(self, name)[...] = values.numpy()


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
    alpha_velocity: Floats = field(metadata=FLOAT)
    incubation_target: Floats = field(metadata=FLOAT)
    fading: Bools = field(metadata=FLAG)
    blueprint: Ints = field(metadata={**INT, "empty": -1})
    """Index into the action spec's blueprints, -1 without a seed."""
    parameters: Ints = field(metadata=INT)
    trial: Floats = field(metadata=MEASURED)
    trial_error: Floats = field(metadata=MEASURED)
    contribution: Floats = field(metadata=MEASURED)
    contribution_error: Floats = field(metadata=MEASURED)
    contribution_change: Floats = field(metadata=FLOAT)
    interaction: Floats = field(metadata=FLOAT)
    epochs_since_measured: Ints = field(metadata=INT)
    gradient_norm: Floats = field(metadata=MEASURED)
    gradient_ratio: Floats = field(metadata=MEASURED)
    gradient_health: Floats = field(metadata=MEASURED)
    vanishing: Floats = field(metadata=MEASURED)
    exploding: Floats = field(metadata=MEASURED)
    gate_score: Floats = field(metadata=FLOAT)
    """Fraction of the next gate's checks that hold; 0 without a gate."""
    gate_passed: Bools = field(metadata=FLAG)

    @property
    def holding(self) -> Bools:
        """True if no ramp of alpha is running."""
        return np.asarray(self.alpha_done >= self.alpha_steps)

    @property
    def living(self) -> Bools:
        return IS_LIVING[self.stage]

    @property
    def fossil(self) -> Bools:
        return np.asarray(self.stage == SeedStage.FOSSILIZED)

    @property
    def blended_alpha(self) -> Floats:
        """Alpha of seeds in the forward pass, 0 for other slots."""
        return np.where(IS_BLENDED[self.stage], self.alpha, 0.0)


@dataclass
class Fleet(Arrays):
    """The state of envs, [E]; accuracies in pp."""

    slots: Slots
    epoch: Ints = field(metadata=INT)
    train_loss: Floats = field(metadata=FLOAT)
    train_accuracy: Floats = field(metadata=FLOAT)
    loss: Floats = field(metadata=FLOAT)
    """Validation loss with everything on."""
    accuracy: Floats = field(metadata=FLOAT)
    committed: Floats = field(metadata=FLOAT)
    """Accuracy with fossils only."""
    all_off: Floats = field(metadata=FLOAT)
    committed_loss: Floats = field(metadata=FLOAT)
    """Validation loss with fossils only."""
    all_off_loss: Floats = field(metadata=FLOAT)
    loss_ago: Floats = field(metadata={**FLOAT, "shape": (HISTORY,)})
    """Losses one epoch ago, two, ..., [E, HISTORY]; the first value if the history is shorter."""
    accuracy_ago: Floats = field(metadata={**FLOAT, "shape": (HISTORY,)})
    best_accuracy: Floats = field(metadata=FLOAT)
    epochs_since_best: Ints = field(metadata=INT)
    last_op: Ints = field(metadata=INT)
    succeeded: Bools = field(metadata={**FLAG, "empty": True})
    rolled_back: Bools = field(metadata=FLAG)
    rollbacks: Ints = field(metadata=INT)
    anomaly_pending: Bools = field(metadata=FLAG)
    potential: Floats = field(metadata=FLOAT)
    """The potential Φ stored by the reward."""


@dataclass(frozen=True)
class Rules:
    """Inputs of masks, observations and rewards that are the same for all envs and the whole run."""

    config: ResolvedConfig
    spec: ActionSpec
    baseline: Baseline
    horizon: int
    host_parameters: int
    largest: Ints
    """Number of parameters of each blueprint in each slot with its largest blend style, [S, B]."""

    @cached_property
    def durations(self) -> Durations:
        return self.config.durations

    @property
    def budget(self) -> float:
        """Max parameters that seeds may add."""
        return self.config.env.parameter_budget * self.host_parameters

    @cached_property
    def _accuracy(self) -> Floats:
        return np.array(self.baseline.accuracy)

    @cached_property
    def _loss(self) -> Floats:
        return self.baseline.in_stds(np.array(self.baseline.loss))

    def baseline_at(self, epoch: Ints, ahead: int = 0) -> Floats:
        """Returns b_t at these epochs, or ``ahead`` epochs later, pp; the last value beyond the horizon."""
        return self._accuracy[np.minimum(epoch + ahead, self.horizon)]

    def baseline_loss_at(self, epoch: Ints, ahead: int = 0) -> Floats:
        """Returns the no-growth loss at these epochs, or ``ahead`` later, in standard deviations of the final one."""
        return self._loss[np.minimum(epoch + ahead, self.horizon)]


def reward_state(fleet: Fleet, rules: Rules) -> RewardState:
    """Copies the inputs of rewards, [E] each, so that later changes of the fleet do not affect them."""
    slots = fleet.slots
    return RewardState(
        accuracy=fleet.accuracy.copy(),
        committed=fleet.committed.copy(),
        all_off=fleet.all_off.copy(),
        baseline=rules.baseline_at(fleet.epoch),
        loss=rules.baseline.in_stds(fleet.loss),
        committed_loss=rules.baseline.in_stds(fleet.committed_loss),
        all_off_loss=rules.baseline.in_stds(fleet.all_off_loss),
        baseline_loss=rules.baseline_loss_at(fleet.epoch),
        weighted_parameters=(slots.alpha * slots.parameters).sum(axis=1),
        fossil_parameters=np.where(slots.fossil, slots.parameters, 0).sum(axis=1),
        slots=tuple(
            SlotState(stage, epochs)
            for stage, epochs in zip(slots.stage.T.copy(), slots.epochs_in_stage.T.copy(), strict=True)
        ),
    )
