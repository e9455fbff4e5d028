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
    """Accuracy with every seed off; NaN, as its loss, in an epoch of an ``esper.Grower`` that does not measure it."""
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
class Choices:
    """A host and the seeds that could be planted in it, as they are known beforehand: S slots, B blueprints."""

    host_parameters: int
    host_flops: float
    """Floating-point operations of a forward pass of the host without seeds, a sample; 0 if they are not known."""
    parameters: Ints
    """Number of parameters of each blueprint in each slot with its largest blend style, [S, B]; 0 where it does not
    fit."""
    flops: Floats
    """Floating-point operations of a forward pass of such a seed, a sample, [S, B]."""
    kinds: Floats
    """The kind of each blueprint, [B, kinds]; see ``esper.spaces.observation.KINDS``."""

    def in_hosts(self, flops: Floats) -> Floats:
        """Returns operations in units of those of the host; 0 if these are not known."""
        return flops / self.host_flops if self.host_flops else np.zeros_like(flops)

    def flops_of(self, slots: Slots) -> Floats:
        """Returns the operations of each seed in ``slots``, [E, S]; 0 for an empty slot."""
        of_seed = self.flops[np.arange(len(self.flops)), slots.blueprint]
        return np.where(slots.occupied, of_seed, 0.0)


@dataclass(frozen=True)
class Rules:
    """Inputs of masks, observations and rewards that are the same for all envs and the whole run."""

    config: TrainingConfig
    baseline: Baseline
    horizon: int
    choices: Choices

    @property
    def budget(self) -> float:
        """Max parameters that seeds may add."""
        return self.config.env.parameter_budget * self.choices.host_parameters

    def affordable(self, slots: Slots) -> Bools:
        """Returns the blueprints that fit in each slot and within what is left of the budgets, [E, S, B]."""
        size, choices = self.choices.parameters, self.choices
        left = self.budget - slots.parameters.sum(axis=1)
        within = (size > 0) & (size <= left[:, None, None])
        if self.config.env.flop_budget is not None:
            budget = self.config.env.flop_budget * choices.host_flops
            left = budget - choices.flops_of(slots).sum(axis=1)
            within &= choices.flops <= left[:, None, None]
        return np.asarray(within)

    def share(self, parameters: Floats | Ints, flops: Floats) -> Floats:
        """Returns the size of seeds in sizes of the host, in that of both which rent is paid in."""
        reward = self.config.reward
        if reward.rent_in == "flops":
            return self.choices.in_hosts(flops)
        return parameters / max(self.choices.host_parameters, reward.rent_host_floor)

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
    all_off_loss = rules.baseline.in_stds(state.all_off_loss)
    return RewardState(
        accuracy=state.accuracy.copy(),
        committed=state.committed.copy(),
        all_off=state.all_off.copy(),
        baseline=rules.baseline_at(state.epoch),
        loss=rules.baseline.in_stds(state.loss),
        committed_loss=rules.baseline.in_stds(state.committed_loss),
        # A loss that is NaN beside an accuracy is a bad one, and both are NaN if they were not measured.
        all_off_loss=np.where(np.isnan(state.all_off), np.nan, all_off_loss),
        baseline_loss=rules.baseline_loss_at(state.epoch),
        weighted_share=rules.share(
            (slots.alpha * slots.parameters).sum(axis=1),
            (slots.alpha * rules.choices.flops_of(slots)).sum(axis=1),
        ),
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
