"""Legal actions of slots: rules of ops, caps of a host, and the budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from esper.config import Durations, EnvConfig, TrainingConfig
from esper.core.action import Op
from esper.core.legal import legal_actions
from esper.core.mask import ActionMask
from esper.core.slots import Slots
from esper.core.stage import SeedStage
from tests.core.grown import made

S = SeedStage
DURATIONS = Durations.of(TrainingConfig(), 30)
SIZES = np.array([[100, 300], [100, 300], [100, 300]])


def legal(slots: Slots, budget: float = 1000.0, **env: Any) -> ActionMask:
    left = budget - slots.parameters.sum(axis=1)
    return legal_actions(
        slots,
        EnvConfig(**env),
        DURATIONS,
        SIZES[: slots.stage.shape[1]] <= left[:, None, None],
    )


def ops_of(stage: SeedStage, **env: Any) -> set[str]:
    """Legal ops of an old seed in a host with no other slot."""
    found = legal(made(stage=stage, age=20, alpha=1.0, alpha_target=1.0), **env)
    return {op.name for op in Op if found.op[0, op]} - {"WAIT"}


@pytest.mark.parametrize(
    ("stage", "ops"),
    [
        (S.DORMANT, {"GERMINATE"}),
        (S.GERMINATED, {"ADVANCE", "PRUNE"}),
        (S.TRAINING, {"ADVANCE", "PRUNE"}),
        (S.BLENDING, {"ADVANCE", "PRUNE", "SET_ALPHA_TARGET"}),
        (S.HOLDING, {"FOSSILIZE", "PRUNE", "SET_ALPHA_TARGET"}),
        (S.FOSSILIZED, set()),
        (S.PRUNED, set()),
        (S.EMBARGOED, set()),
        (S.RESETTING, set()),
    ],
)
def test_each_stage_has_its_ops(stage: SeedStage, ops: set[str]) -> None:
    assert ops_of(stage) == ops


def test_an_automatic_gate_takes_advance_away() -> None:
    assert ops_of(S.GERMINATED, auto_advance={"G1"}) == {"PRUNE"}
    assert "ADVANCE" in ops_of(S.TRAINING, auto_advance={"G1"})


def test_a_young_seed_and_one_on_a_ramp_cannot_be_pruned() -> None:
    assert not legal(made(stage=S.HOLDING, age=DURATIONS.min_prune_age - 1)).op[
        0, Op.PRUNE
    ]
    assert legal(made(stage=S.HOLDING, age=DURATIONS.min_prune_age)).op[0, Op.PRUNE]
    moving = legal(made(stage=S.BLENDING, age=20, alpha_steps=5, alpha_done=4))
    assert not moving.op[0, [Op.PRUNE, Op.SET_ALPHA_TARGET]].any()


@pytest.mark.parametrize(
    ("stages", "env", "planted"),
    [
        ((S.DORMANT, S.TRAINING, S.DORMANT), {}, []),
        ((S.DORMANT, S.EMBARGOED, S.DORMANT), {}, []),
        ((S.DORMANT, S.TRAINING, S.DORMANT), {"one_incubating": False}, [0, 2]),
        ((S.DORMANT, S.HOLDING, S.DORMANT), {}, [0, 2]),
        ((S.DORMANT, S.HOLDING, S.DORMANT), {"max_seeds": 1}, []),
        ((S.DORMANT, S.FOSSILIZED, S.DORMANT), {"max_seeds": 1}, [0, 2]),
        ((S.DORMANT, S.FOSSILIZED, S.HOLDING), {"max_fossils": 2}, []),
        ((S.DORMANT, S.FOSSILIZED, S.HOLDING), {"max_fossils": 3}, [0]),
    ],
)
def test_caps_of_a_host_limit_where_seeds_are_planted(
    stages: tuple[SeedStage, ...], env: dict[str, Any], planted: list[int]
) -> None:
    slots = made(1, 3)
    slots.stage[0] = stages
    assert (
        np.flatnonzero(legal(slots, **env).op_slot[0, Op.GERMINATE]).tolist() == planted
    )


def test_a_blueprint_has_to_fit_the_rest_of_the_budget() -> None:
    slots = made(3, 2)
    slots.stage[:, 0], slots.parameters[:, 0] = S.HOLDING, [0, 150, 250]
    found = legal(slots, budget=300.0)
    assert found.slot_blueprint[:, 1].tolist() == [
        [True, True],
        [True, False],
        [False, False],
    ]
    assert found.op[:, Op.GERMINATE].tolist() == [True, True, False]
