"""Arrays of slots: initial values, resets and writes, and what follows from a stage."""

from __future__ import annotations

import numpy as np

from esper.core.slots import MEASUREMENTS, Slots, stage_table
from esper.core.stage import SeedStage
from tests.core.grown import made

S = SeedStage


def test_fresh_slots_are_empty_and_unmeasured() -> None:
    slots = Slots.fresh(2, 3)
    assert {values.shape for values in slots.arrays().values()} == {(2, 3)}
    assert (slots.stage == S.DORMANT).all()
    assert (slots.blueprint == -1).all()
    assert np.isnan(slots.contribution).all()
    assert slots.alpha.sum() == 0
    assert slots.arrays().keys() >= set(MEASUREMENTS)


def test_a_reset_is_of_chosen_slots_and_keeps_the_fields_that_are_named() -> None:
    slots = made(1, 2, stage=S.TRAINING, age=4, blueprint=1, trial=2.0)
    slots.clear(np.array([[True, False]]), keep=("age",))
    assert slots.stage.tolist() == [[S.DORMANT, S.TRAINING]]
    assert slots.blueprint.tolist() == [[-1, 1]]
    assert slots.age.tolist() == [[4, 4]]
    assert np.isnan(slots.trial).tolist() == [[True, False]]


def test_values_are_written_to_chosen_slots_in_place() -> None:
    slots = made(1, 3)
    alpha, where = slots.alpha, np.array([[True, False, True]])
    slots.write(where, alpha=np.array([[0.1, 0.2, 0.3]]), age=7)
    assert slots.alpha is alpha
    assert alpha.tolist() == [[0.1, 0.0, 0.3]]
    assert slots.age.tolist() == [[7, 0, 7]]


def test_a_table_of_stages_is_indexed_by_their_values() -> None:
    table = stage_table({S.HOLDING, S.RESETTING})
    assert [stage for stage in S if table[stage]] == [S.HOLDING, S.RESETTING]


def test_a_seed_whose_alpha_falls_does_not_learn() -> None:
    ramp = {"stage": S.BLENDING, "alpha_start": 1.0, "alpha_steps": 3}
    falling, rising = (
        made(**{**ramp, "alpha_target": 0.5}),
        made(**{**ramp, "alpha_target": 1.5}),
    )
    arrived = made(**{**ramp, "alpha_target": 0.5, "alpha_done": 3})
    assert [slots.lowering.item() for slots in (falling, rising, arrived)] == [
        True,
        False,
        False,
    ]
    assert [slots.learning.item() for slots in (falling, rising, arrived)] == [
        False,
        True,
        True,
    ]
    assert [
        made(stage=stage).learning.item()
        for stage in (S.GERMINATED, S.FOSSILIZED, S.PRUNED)
    ] == [
        False,
        True,
        False,
    ]


def test_alpha_counts_in_the_forward_pass_only_from_blending_on() -> None:
    stages = (S.TRAINING, S.BLENDING, S.HOLDING, S.FOSSILIZED, S.PRUNED)
    assert [made(stage=stage, alpha=0.5).alpha_on.item() for stage in stages] == [
        0,
        0.5,
        0.5,
        0.5,
        0,
    ]


def test_parameters_of_fossils_are_summed_by_host() -> None:
    slots = made(2, 3, parameters=10)
    slots.stage[...] = [
        [S.FOSSILIZED, S.HOLDING, S.FOSSILIZED],
        [S.TRAINING, S.DORMANT, S.HOLDING],
    ]
    assert slots.fossil_parameters.tolist() == [20, 0]
