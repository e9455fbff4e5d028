"""Reward terms: pure functions of the measurements before and after an action. Accuracies are pp, 0 to 100.

a is the validation accuracy with everything on, c the committed accuracy (fossils only), b the no-growth baseline, and
T the horizon. Potential terms pay γΦ(s') − Φ(s), which preserves optimal policies. Losses are validation losses in
standard deviations of the baseline's final loss (``Baseline.in_stds``); every term rewards a lower loss.

Values are arrays [E], or scalars for one env; a term has the shape of its inputs. ``MODES`` of
:mod:`esper.core.reward_modes` says which terms a mode pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from esper.config import RewardConfig
from esper.core.action import Op
from esper.core.arrays import Bools, Floats, Ints
from esper.core.stage import SeedStage

CLIMBED = (
    SeedStage.GERMINATED,
    SeedStage.TRAINING,
    SeedStage.BLENDING,
    SeedStage.HOLDING,
    SeedStage.FOSSILIZED,
)
"""The stages of ``RewardConfig.stage_potentials``."""
Value = Floats | float
Count = Ints | int
Flag = Bools | bool


@cache
def _by_stage(potentials: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Returns Φ(stage), and Φ(next) − Φ(stage) or 0 without a next stage, indexed by a stage's value."""
    potential = np.zeros(max(SeedStage) + 1)
    potential[list(CLIMBED)] = potentials
    climb = np.zeros_like(potential)  # a fossil has no next stage
    climb[list(CLIMBED[:-1])] = np.diff(potentials)
    return potential, climb


@dataclass(frozen=True)
class RewardState:
    """Everything that a reward reads from envs at one moment; accuracies in pp, losses in baseline sd."""

    accuracy: Value
    committed: Value
    all_off: Value
    baseline: Value
    loss: Value
    """Validation loss with everything on."""
    committed_loss: Value
    all_off_loss: Value
    baseline_loss: Value
    weighted_share: Value
    """Σ alpha · size over seeds, in sizes of the host; see ``EpisodeRules.share``."""
    fossil_parameters: Count
    stage: Ints
    epochs_in_stage: Ints
    """Stages of the slots and epochs spent in them, [E, S]."""
    merges: Count = 0
    """Number of seeds that have become a part of the host's layers."""
    doublings: Value = 0.0
    """Binary logarithm of the parameters of the host with all seeds, in those that it began with."""
    kept_doublings: Value = 0.0
    """The same with fossils only."""


@dataclass(frozen=True)
class Transition:
    """One step of envs: the states before and after it, the executed ops and their outcome."""

    before: RewardState
    after: RewardState
    op: Count
    """An Op."""
    succeeded: Flag
    rolled_back: Flag
    terminated: Flag
    horizon: Count
    budget: Value
    """Max parameters that seeds may add."""
    doubling: Value
    """Price of a doubling of the parameters, pp."""


def benefit(t: Transition, config: RewardConfig) -> Floats:
    """(c − b) / benefit_scale at termination."""
    gained = t.after.committed - t.after.baseline
    return np.where(t.terminated, gained / config.benefit_scale, 0.0)


def loss_benefit(t: Transition, config: RewardConfig) -> Floats:
    """−(committed loss − no-growth loss) / loss_benefit_scale at termination."""
    gained = t.after.baseline_loss - t.after.committed_loss
    return np.where(t.terminated, gained / config.loss_benefit_scale, 0.0)


def score(t: Transition, config: RewardConfig) -> Floats:
    """c / benefit_scale at termination."""
    return np.where(t.terminated, np.asarray(t.after.committed) / config.benefit_scale, 0.0)


def price(t: Transition, config: RewardConfig) -> Floats:
    """−price / benefit_scale for each doubling of the parameters, when it is bought; what is not kept is paid back."""
    after = np.where(t.terminated, t.after.kept_doublings, t.after.doublings)
    bought = after - t.before.doublings
    return np.asarray(-t.doubling * bought / config.benefit_scale)


def rent(t: Transition, config: RewardConfig) -> Floats:
    """−min(rent_rate · ln(1 + share), rent_cap) / T each epoch."""
    return -rent_rate(t.after.weighted_share, config) / t.horizon


def rent_rate(share: Value, config: RewardConfig) -> Floats:
    """min(rent_rate · ln(1 + share), rent_cap): the rent of an episode with seeds of this size in sizes of the host."""
    return np.minimum(config.rent_rate * np.log1p(share), config.rent_cap)


def stage_potential(
    state: RewardState,
    config: RewardConfig,
    dwell: int,
) -> Floats:
    """Σ over slots of Φ(stage) + stage_climb · (Φ(next) − Φ(stage)) · min(epochs in stage / dwell, 1); a fossil: Φ."""
    potential, climb = _by_stage(config.stage_potentials)
    # The way to the next stage's potential, of which epochs in this stage cover a part.
    dwelt = np.minimum(state.epochs_in_stage / dwell, 1.0)
    risen = config.stage_climb * climb[state.stage] * dwelt
    # A merged seed counts as the fossil that it was.
    total = np.zeros(np.shape(state.accuracy))
    total = total + potential[SeedStage.FOSSILIZED] * np.asarray(state.merges)
    for slot in range(state.stage.shape[-1]):  # one by one: the order is part of the result
        total = total + potential[state.stage[..., slot]] + risen[..., slot]
    return np.asarray(total)


def contribution_potential(state: RewardState, *_: Any) -> Value:
    """Accuracy with everything on minus accuracy with every seed off, pp; minus the no-growth baseline once seeds have
    been merged, which nothing switches off."""
    merged = np.asarray(state.merges) > 0
    without = np.where(merged, state.baseline, state.all_off)
    return state.accuracy - without


def loss_contribution_potential(state: RewardState, *_: Any) -> Value:
    """Loss with every seed off minus loss with everything on; positive if seeds help. The no-growth loss minus that
    once seeds have been merged."""
    merged = np.asarray(state.merges) > 0
    without = np.where(merged, state.baseline_loss, state.all_off_loss)
    return without - state.loss


def action_cost(t: Transition, config: RewardConfig) -> Floats:
    """−cost of the action: 0 for WAIT; GERMINATE, a refused ADVANCE or FOSSILIZE, and the rest cost differently."""
    op = np.asarray(t.op)
    # Only a gate charges for a refusal: a GERMINATE that failed costs what it always does.
    gated = (op == Op.ADVANCE) | (op == Op.FOSSILIZE)
    refused = gated & ~np.asarray(t.succeeded)

    cost = np.where(op == Op.GERMINATE, config.germinate_cost, config.action_cost)
    cost = np.where(refused, config.refused_cost, cost)
    return -np.where(op == Op.WAIT, 0.0, cost)


def governor(t: Transition, config: RewardConfig) -> Floats:
    """−rollback_penalty in the epoch of a rollback."""
    return np.where(t.rolled_back, -config.rollback_penalty, 0.0)


def advantage(t: Transition, config: RewardConfig) -> Floats:
    """((a − b)' − (a − b)) / benefit_scale each epoch; at termination, c replaces a'."""
    final = np.where(t.terminated, t.after.committed, t.after.accuracy)
    after = final - t.after.baseline
    before = t.before.accuracy - t.before.baseline
    gained = after - before
    return np.asarray(gained / config.benefit_scale)


def fossil_cost(t: Transition, config: RewardConfig) -> Floats:
    """−sparse_parameter_cost · fossil parameters / budget at termination."""
    cost = -config.sparse_parameter_cost * t.after.fossil_parameters / t.budget
    return np.where(t.terminated, cost, 0.0)
