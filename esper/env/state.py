"""The state of many envs as arrays, from which masks, observations and rewards are computed. E envs, S slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import TrainingConfig
from esper.env.baseline import Baseline
from esper.lifecycle.slots import FLAG, FLOAT, INT, Arrays, Bools, Floats, Ints, Slots
from esper.rewards.terms import RewardState
from esper.spaces.observation import HISTORY


@dataclass
class EnvState(Arrays):
    """The state of envs, [E]; accuracies in pp."""

    slots: Slots
    done: Bools = field(metadata={**FLAG, "empty": True})
    """True between the end of an episode and the start of the next."""
    truncated: Bools = field(metadata=FLAG)
    episode: Ints = field(metadata={**INT, "empty": -1})
    """Number of the current episode: 0 for the first under the run seed, -1 before it."""
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
    total_reward: Floats = field(metadata=FLOAT)


@dataclass(frozen=True)
class Rules:
    """Inputs of masks, observations and rewards that are the same for all envs and the whole run."""

    config: TrainingConfig
    baseline: Baseline
    horizon: int
    host_parameters: int
    largest: Ints
    """Number of parameters of each blueprint in each slot with its largest blend style, [S, B]; 0 where it does not
    fit."""
    kinds: Floats
    """The parts that each blueprint is built of, [B, 3]; see ``esper.spaces.observation.KINDS``."""

    @property
    def budget(self) -> float:
        """Max parameters that seeds may add."""
        return self.config.env.parameter_budget * self.host_parameters

    @cached_property
    def _curves(self) -> tuple[Floats, Floats]:
        return np.array(self.baseline.accuracy), self.baseline.in_stds(np.array(self.baseline.loss))

    def baseline_at(self, epoch: Ints, ahead: int = 0) -> Floats:
        """Returns b_t at these epochs, or ``ahead`` epochs later, pp; the last value beyond the horizon."""
        return self._curves[0][np.minimum(epoch + ahead, self.horizon)]

    def baseline_loss_at(self, epoch: Ints, ahead: int = 0) -> Floats:
        """Returns the no-growth loss at these epochs, or ``ahead`` later, in standard deviations of the final one."""
        return self._curves[1][np.minimum(epoch + ahead, self.horizon)]


def reward_state(state: EnvState, rules: Rules) -> RewardState:
    """Copies the inputs of rewards, [E] each, so that later changes do not affect them."""
    slots = state.slots
    return RewardState(
        accuracy=state.accuracy.copy(),
        committed=state.committed.copy(),
        all_off=state.all_off.copy(),
        baseline=rules.baseline_at(state.epoch),
        loss=rules.baseline.in_stds(state.loss),
        committed_loss=rules.baseline.in_stds(state.committed_loss),
        all_off_loss=rules.baseline.in_stds(state.all_off_loss),
        baseline_loss=rules.baseline_loss_at(state.epoch),
        weighted_parameters=(slots.alpha * slots.parameters).sum(axis=1),
        fossil_parameters=slots.fossil_parameters,
        stage=slots.stage.copy(),
        epochs_in_stage=slots.epochs_in_stage.copy(),
    )


def copied(values: NDArray[Any]) -> Tensor:
    """Copies an array to a tensor, which can be loaded from a file without running code."""
    return torch.from_numpy(np.array(values))


def table_of(state: EnvState, rows: slice) -> Floats:
    """Returns a copy of all values of these envs, float64 [rows, values]; flags and integers are exact in it."""
    arrays = (*state.arrays().values(), *state.slots.arrays().values())
    columns = [values[rows].reshape(len(values[rows]), -1).astype(np.float64) for values in arrays]
    return np.concatenate(columns, axis=1)


def write_table(state: EnvState, rows: slice, table: Floats) -> None:
    """Overwrites all values of these envs with those of a table of :func:`table_of`."""
    column = 0
    for values in (*state.arrays().values(), *state.slots.arrays().values()):
        width = values[0].size
        values[rows] = table[:, column : column + width].reshape(-1, *values.shape[1:])
        column += width


def write_changes(state: EnvState, rows: slice, before: Floats, after: Floats) -> None:
    """Writes the values of these envs that differ, bit for bit, between two tables, and leaves all others."""
    table = table_of(state, rows)
    changed = before.view(np.int64) != after.view(np.int64)
    table[changed] = after[changed]
    write_table(state, rows, table)
