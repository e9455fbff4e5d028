"""The state of many envs as arrays, and the rules by which masks, observations and rewards follow from it.

E envs, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import TrainingConfig
from esper.core.observation import HISTORY
from esper.core.reward_modes import price_of
from esper.core.reward_terms import RewardState
from esper.core.slots import FLAG, FLOAT, INT, MEASURED, Arrays, Bools, Floats, Ints, Slots
from esper.core.stage import SeedStage

MIN_STD = 1e-3
"""Min standard deviation of the final loss."""
MIN_LOSS = 1e-6
"""Min size of a loss that others are divided by."""


@dataclass(frozen=True)
class Baseline:
    """Curves by epochs done, 0 to T; accuracy is pp on the validation split."""

    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    final_loss_std: float
    """Standard deviation over hosts of the last loss, at least 1e-3."""
    episodes: int
    class_accuracy: tuple[float, ...] = ()
    """Mean final accuracy on each class, pp; () if it is not known."""

    def in_stds(self, loss: Floats) -> Floats:
        """Losses [...] in standard deviations of the final loss.

        Losses are clipped at the baseline's worst one, that of the untrained host; non-finite ones count as that, which
        keeps rewards finite.
        """
        # Of a number and NaN, fmin takes the number.
        return np.asarray(np.fmin(loss, max(self.loss)) / self.final_loss_std)

    def check(self, horizon: int) -> None:
        """Raises ValueError when the curves are not those of an episode of ``horizon`` epochs."""
        points = horizon + 1
        if len(self.accuracy) != points or len(self.loss) != points:
            raise ValueError(
                f"the baseline has {len(self.accuracy) - 1} epochs, the episode {horizon}: measure it again"
            )


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
    edits: Ints = field(metadata=INT)
    """Number of decisions other than WAIT since the last epoch was trained."""
    edit_reward: Floats = field(metadata=FLOAT)
    """Sum of the rewards of those after which nothing was trained."""
    trained: Bools = field(metadata=FLAG)
    """True if the last step trained an epoch."""
    train_loss: Floats = field(metadata=FLOAT)
    train_accuracy: Floats = field(metadata=FLOAT)
    train_measured: Bools = field(metadata=FLAG)
    """Whether these two were measured; they are 0 if not."""
    loss: Floats = field(metadata=FLOAT)
    """Validation loss with everything on."""
    first_loss: Floats = field(metadata=FLOAT)
    """That of the untrained host, or of the first validation."""
    accuracy: Floats = field(metadata=FLOAT)
    committed: Floats = field(metadata=FLOAT)
    """Accuracy with fossils only."""
    all_off: Floats = field(metadata=FLOAT)
    """Accuracy with every seed off; NaN, as its loss, in an epoch of an ``esper.Grower`` that does not measure it."""
    committed_loss: Floats = field(metadata=FLOAT)
    """Validation loss with fossils only."""
    all_off_loss: Floats = field(metadata=FLOAT)
    gradient_norm: Floats = field(metadata=MEASURED)
    """Norm of the host's gradient, averaged over the epoch's batches; NaN before the first epoch."""
    gradient_health: Floats = field(metadata=MEASURED)
    vanishing: Floats = field(metadata=MEASURED)
    """Fraction of vanishing gradient tensors of the host, averaged over the epoch's batches."""
    exploding: Floats = field(metadata=MEASURED)
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


OF_HOSTS = ("parameters", "flops", "widths", "removable")
"""Arrays of Choices that change while a host grows."""
OF_FIRST = ("host_parameters", "host_flops", *OF_HOSTS, "kinds", "users", "inside")
"""All fields of Choices, which differ between the hosts of envs that draw one for each episode."""


@dataclass(frozen=True)
class Choices:
    """Sizes and costs of a host and of the seeds that could be planted in it: S slots, B blueprints.

    Of several hosts that have grown since, those of seeds are [E, S, B], ``widths`` and ``removable`` are [E, S]. Where
    envs have different hosts, all fields have a first dimension E, the first two as well.
    """

    host_parameters: int
    host_flops: float
    """Floating-point operations of a forward pass of the host without seeds, a sample; 0 if unknown."""
    parameters: Ints
    """Number of parameters of each blueprint in each slot with its largest blend style, [S, B]; 0 where it does not
    fit."""
    flops: Floats
    """Floating-point operations of a forward pass of such a seed, a sample, [S, B]."""
    widths: Ints
    """Units of the layer that grows in each slot, or channels where none does, [S]."""
    kinds: Floats
    """The kind of each blueprint, [B, kinds]; see ``esper.core.observation.KINDS``."""
    removable: Ints
    """Number of units that the last merge of each slot has added to its layer, and that can be taken out, [S]."""
    users: Bools
    """True where a seed in the second slot reads or adds to the units between the layers of the first one, all of them,
    [S, S]."""
    inside: Bools
    """True where a seed in the second slot changes these units, those that there are when it is planted, [S, S]."""

    def in_hosts(self, flops: Floats) -> Floats:
        """Returns operations as multiples of those of the host; 0 if the latter are unknown."""
        of_hosts = by_env(self.host_flops, flops)
        return np.divide(flops, of_hosts, out=np.zeros_like(flops), where=of_hosts > 0)

    def flops_of(self, slots: Slots) -> Floats:
        """Returns the operations of each seed in ``slots``, [E, S]; 0 for an empty slot."""
        envs, places = slots.stage.shape
        of_envs = np.broadcast_to(self.flops, (envs, *self.flops.shape[-2:]))
        env = np.arange(envs)[:, None]
        slot = np.arange(places)
        of_seed = of_envs[env, slot, slots.blueprint]
        return np.where(slots.occupied, of_seed, 0.0)

    def of_envs(
        self,
        envs: int,
        fields: Sequence[str] = OF_HOSTS,
    ) -> Choices:
        """Returns a copy whose ``fields`` have a first dimension E, so that they may differ between envs."""
        copies: dict[str, Any] = {name: np.stack([getattr(self, name)] * envs) for name in fields}
        return replace(self, **copies)

    def put(
        self,
        envs: Bools | int,
        sizes: Choices,
        fields: Sequence[str] = OF_HOSTS,
    ) -> None:
        """Overwrites the ``fields`` of ``envs`` in a copy of :meth:`of_envs` with those of another host."""
        for name in fields:
            getattr(self, name)[envs] = getattr(sizes, name)


def never_shrinks(slots: int) -> dict[str, Any]:
    """Returns the fields of Choices about units that can be taken out, of hosts whose layers do not shrink."""
    return {
        "removable": np.zeros(slots, dtype=np.int64),
        "users": np.zeros((slots, slots), dtype=np.bool_),
        "inside": np.zeros((slots, slots), dtype=np.bool_),
    }


def by_env(values: Floats | Ints | float, like: Floats | Ints) -> Floats:
    """Returns ``values`` [E], or a number for all envs, in a shape that broadcasts with ``like`` [E, ...]."""
    of_envs = np.asarray(values, dtype=np.float64)
    if of_envs.ndim == 0:
        return of_envs
    return of_envs.reshape(-1, *(1,) * (np.ndim(like) - 1))


@dataclass(frozen=True)
class Setting:
    """All that is known of the training of a host before its first epoch; 0 for what is not.

    Where envs draw a training for each episode, the values are arrays [E] of these types.
    """

    samples: int = 0
    """Number of training samples."""
    updates: float = 0
    """Number of steps of the optimizer in an epoch."""
    inputs: int = 0
    """Number of values in the inputs of a sample."""
    classes: int = 0
    """Number of classes, if the loss is cross-entropy."""
    learning_rate: float = 0.0
    """The optimizer's first rate, before any schedule."""
    price: float | None = None
    """Price of a doubling of the parameters, pp; None: ``reward.price``."""


@dataclass(frozen=True)
class EpisodeRules:
    """Inputs of masks, observations and rewards that are the same for all envs and the whole run.

    Where envs draw their hosts, numbers are arrays [E] that follow the episodes.
    """

    config: TrainingConfig
    baseline: Baseline
    horizon: int | Ints
    choices: Choices
    """Those of a new host."""
    offers: Choices | None = None
    """Those of seeds in the hosts of all envs as they are now; None: hosts stay as they were."""
    setting: Setting = Setting()

    @property
    def present(self) -> Choices:
        """The sizes and costs of seeds in the hosts as they are."""
        return self.offers or self.choices

    @property
    def budget(self) -> float:
        """Max parameters that seeds may add."""
        return self.config.env.parameter_budget * self.choices.host_parameters

    def affordable(self, slots: Slots) -> Bools:
        """Returns the blueprints that fit in each slot and within what is left of the budgets, [E, S, B]."""
        choices = self.present
        fits = choices.parameters > 0
        left = self.budget - slots.added_parameters
        within = fits & (choices.parameters <= left[:, None, None])
        if self.config.env.flop_budget is not None:
            flop_budget = self.config.env.flop_budget * choices.host_flops
            flops_left = flop_budget - self.added_flops(slots)
            within &= choices.flops <= flops_left[:, None, None]
        return np.asarray(within)

    def shrinkable(self, slots: Slots, epoch: Ints) -> Bools:
        """Returns the slots from whose layers PRUNE can take units, [E, S]: no seed uses these."""
        present = self.present
        planted = epoch[:, None] - slots.age
        # [E, S, S]: a seed in the second slot that was planted before the first layer grew keeps to its channels.
        sees = planted[:, None, :] >= slots.first_merge[:, :, None]
        uses = present.users | (present.inside & sees)
        used = (uses & slots.occupied[:, None, :]).any(axis=2)
        return np.asarray((present.removable > 0) & (slots.stage == SeedStage.DORMANT) & ~used)

    def added_flops(self, slots: Slots) -> Floats:
        """Returns the operations of all seeds of a host, merged ones included, [E]."""
        of_seeds = self.present.flops_of(slots)
        of_slots = of_seeds + slots.merged_flops
        return np.asarray(of_slots.sum(axis=1))

    def fossil_flops(self, slots: Slots) -> Floats:
        """Returns the operations of all fossils of a host, merged ones included, a sample, [E]."""
        of_fossils = np.where(slots.fossil, self.present.flops_of(slots), 0.0)
        return np.asarray((of_fossils + slots.merged_flops).sum(axis=1))

    def share(self, parameters: Floats | Ints, flops: Floats) -> Floats:
        """Returns the size of seeds in sizes of the host, in that of both which rent is paid in."""
        reward = self.config.reward
        if reward.rent_in == "flops":
            return self.choices.in_hosts(flops)
        return parameters / np.maximum(by_env(self.choices.host_parameters, parameters), reward.rent_host_floor)

    def price(
        self,
        parameters: Floats | Ints,
        flops: Floats,
    ) -> Floats:
        """Returns the rise of final accuracy that makes up for what the reward takes for such a seed in an episode, pp.

        That is so if it is the only one, and is there from the first epoch on.
        """
        return price_of(
            self.share(parameters, flops),
            parameters / by_env(self.budget, parameters),
            parameters / by_env(self.choices.host_parameters, parameters),
            by_env(self.doubling, parameters),
            self.config.reward,
        )

    @property
    def doubling(self) -> float:
        """The price of a doubling of the parameters in ``reward.mode=priced``, pp."""
        return self.config.reward.price if self.setting.price is None else self.setting.price

    def doublings(self, added: Ints) -> Floats:
        """Returns how often hosts with this many parameters more than at first have doubled their number, [E]."""
        return np.asarray(np.log2(1 + added / self.choices.host_parameters))

    @property
    def price_of_doubling(self) -> Floats:
        """The price of a seed that is as large as the first host, pp."""
        choices = self.choices
        return self.price(np.asarray(choices.host_parameters), np.asarray(choices.host_flops))

    def chance(self, first_loss: Floats) -> Floats:
        """Returns the loss of a guess, [E]; where that is unknown, the size of the first loss takes its place."""
        classes = np.asarray(self.setting.classes)
        guess = np.log(np.maximum(classes, 1))
        return np.where(classes > 1, guess, np.maximum(np.abs(first_loss), MIN_LOSS))

    @cached_property
    def _accuracies(self) -> Floats:
        return np.array(self.baseline.accuracy)

    @cached_property
    def _losses(self) -> Floats:
        return self.baseline.in_stds(np.array(self.baseline.loss))

    def baseline_at(self, epoch: Ints) -> Floats:
        """Returns b_t at these epochs, pp; the last value beyond the horizon."""
        return self._accuracies[np.minimum(epoch, self.horizon)]

    def baseline_loss_at(self, epoch: Ints) -> Floats:
        """Returns the no-growth loss at these epochs, in standard deviations of the final one."""
        return self._losses[np.minimum(epoch, self.horizon)]


def reward_state(state: EnvState, rules: EpisodeRules) -> RewardState:
    """Copies the inputs of rewards, [E] each, so that later changes do not affect them."""
    slots = state.slots
    baseline = rules.baseline
    flops = rules.present.flops_of(slots)
    share = rules.share(
        (slots.alpha * slots.parameters + slots.merged_parameters).sum(axis=1),
        (slots.alpha * flops + slots.merged_flops).sum(axis=1),
    )
    # A loss that is NaN beside an accuracy is a bad one, and both are NaN if they were not measured.
    measured = ~np.isnan(state.all_off)
    all_off_loss = np.where(measured, baseline.in_stds(state.all_off_loss), np.nan)
    return RewardState(
        accuracy=state.accuracy.copy(),
        committed=state.committed.copy(),
        all_off=state.all_off.copy(),
        baseline=rules.baseline_at(state.epoch),
        loss=baseline.in_stds(state.loss),
        committed_loss=baseline.in_stds(state.committed_loss),
        all_off_loss=all_off_loss,
        baseline_loss=rules.baseline_loss_at(state.epoch),
        weighted_share=share,
        fossil_parameters=slots.fossil_parameters,
        stage=slots.stage.copy(),
        epochs_in_stage=slots.epochs_in_stage.copy(),
        merges=slots.merges.sum(axis=1),
        doublings=rules.doublings(slots.added_parameters),
        kept_doublings=rules.doublings(slots.fossil_parameters),
    )


def copied(values: NDArray[Any]) -> Tensor:
    """Copies an array to a tensor, which can be loaded from a file without running code."""
    return torch.from_numpy(np.array(values))


def table_of(state: EnvState, rows: slice) -> Floats:
    """Returns a copy of all values of these envs, float64 [rows, values]; flags and integers are exact in it."""
    columns = []
    for values in _all_arrays(state):
        of_rows = values[rows]
        columns.append(of_rows.reshape(len(of_rows), -1).astype(np.float64))
    return np.concatenate(columns, axis=1)


def write_table(state: EnvState, rows: slice, table: Floats) -> None:
    """Overwrites all values of these envs with those of a table of :func:`table_of`."""
    column = 0
    for values in _all_arrays(state):
        end = column + values[0].size
        values[rows] = table[:, column:end].reshape(-1, *values.shape[1:])
        column = end


def _all_arrays(state: EnvState) -> list[NDArray[Any]]:
    """Returns the arrays of envs and of their slots, in the order of a table's columns."""
    return [*state.arrays().values(), *state.slots.arrays().values()]


def write_changes(
    state: EnvState,
    rows: slice,
    before: Floats,
    after: Floats,
) -> None:
    """Writes the values of these envs that differ, bit for bit, between two tables, and leaves all others."""
    # As integers, since NaN is equal to NaN then.
    table = table_of(state, rows)
    changed = before.view(np.int64) != after.view(np.int64)
    table[changed] = after[changed]
    write_table(state, rows, table)
