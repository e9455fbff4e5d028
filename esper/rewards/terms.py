"""Reward terms: pure functions of what was measured before and after an action. Accuracies are pp, 0 to 100.

With a the validation accuracy with everything on, c the committed accuracy (fossils only), b the no-growth baseline,
T the horizon. Potential terms pay γΦ(s') − Φ(s), which changes no optimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from esper.config import RewardConfig
from esper.seeds.stage import SeedStage
from esper.spaces.action import Op

STAGE_POTENTIAL: Mapping[SeedStage, float] = MappingProxyType(
    {
        SeedStage.GERMINATED: 1.0,
        SeedStage.TRAINING: 2.0,
        SeedStage.BLENDING: 3.5,
        SeedStage.HOLDING: 5.5,
        SeedStage.FOSSILIZED: 6.0,
    }
)
_ORDER = tuple(STAGE_POTENTIAL)


@dataclass(frozen=True)
class SlotState:
    stage: SeedStage
    epochs_in_stage: int


@dataclass(frozen=True)
class RewardState:
    """All that a reward reads of one env at one moment."""

    accuracy: float
    committed: float
    all_off: float
    baseline: float
    weighted_parameters: float
    """Σ alpha · parameters over seeds."""
    fossil_parameters: int
    slots: tuple[SlotState, ...]


@dataclass(frozen=True)
class Transition:
    before: RewardState
    after: RewardState
    op: Op
    succeeded: bool
    rolled_back: bool
    terminated: bool
    horizon: int
    host_parameters: int
    budget: float
    """Parameters that seeds may add."""


def benefit(t: Transition, config: RewardConfig) -> float:
    """(c − b) / 10 at termination."""
    return (t.after.committed - t.after.baseline) / config.benefit_scale if t.terminated else 0.0


def rent(t: Transition, config: RewardConfig) -> float:
    """−min(0.2 · ln(1 + added / max(host, 200)), 0.6) / T each epoch."""
    return -rent_rate(t.after.weighted_parameters, t.host_parameters, config) / t.horizon


def rent_rate(weighted_parameters: float, host_parameters: int, config: RewardConfig) -> float:
    """The rent of a whole episode at this size."""
    share = weighted_parameters / max(host_parameters, config.rent_host_floor)
    return min(config.rent_rate * math.log1p(share), config.rent_cap)


def stage_potential(state: RewardState, dwell: int) -> float:
    """Σ over slots of Φ(stage) + 0.9 · (Φ(next) − Φ(stage)) · min(epochs in stage / dwell, 1); a fossil: Φ."""
    total = 0.0
    for slot in state.slots:
        here = STAGE_POTENTIAL.get(slot.stage, 0.0)
        total += here
        if here and slot.stage is not SeedStage.FOSSILIZED:
            following = STAGE_POTENTIAL[_ORDER[_ORDER.index(slot.stage) + 1]]
            total += 0.9 * (following - here) * min(slot.epochs_in_stage / dwell, 1.0)
    return total


def contribution_potential(state: RewardState) -> float:
    """Accuracy with everything on minus accuracy with every seed off, pp."""
    return state.accuracy - state.all_off


def action_cost(t: Transition, config: RewardConfig) -> float:
    """What the action itself costs, executed or refused."""
    if t.op is Op.WAIT:
        return 0.0
    if not t.succeeded and t.op in (Op.ADVANCE, Op.FOSSILIZE):
        return -config.refused_cost
    return -config.germinate_cost if t.op is Op.GERMINATE else -config.action_cost


def governor(t: Transition, config: RewardConfig) -> float:
    """−10 in the epoch of a rollback."""
    return -config.rollback_penalty if t.rolled_back else 0.0


def advantage(t: Transition, config: RewardConfig) -> float:
    """((a − b)' − (a − b)) / 10 each epoch, with the committed accuracy in place of a at the end."""
    final = t.after.committed if t.terminated else t.after.accuracy
    gained = (final - t.after.baseline) - (t.before.accuracy - t.before.baseline)
    return gained / config.benefit_scale


def fossil_cost(t: Transition, config: RewardConfig) -> float:
    """−0.1 · fossil parameters / budget at termination."""
    return -config.sparse_parameter_cost * t.after.fossil_parameters / t.budget if t.terminated else 0.0
