"""Transitions of seeds in arrays: the clocks, fading, freezing, and the changes that are refused."""

import copy
from collections.abc import Callable

import numpy as np
import pytest

from esper.core import transitions
from esper.core.slots import Slots
from esper.core.stage import IllegalTransition, SeedStage
from tests.core.grown import (
    every,
    germinate,
    grown,
    made,
    prune,
    set_target,
    tick,
)

S = SeedStage


def same(first: Slots, second: Slots) -> None:
    for name, values in first.arrays().items():
        np.testing.assert_array_equal(values, second.arrays()[name], err_msg=name)


@pytest.mark.trap(8)
@pytest.mark.parametrize("embargo", [1, 5])
def test_cooldown_is_one_embargo_one_and_each_tick_counts_once(embargo: int) -> None:
    slots = grown(S.PRUNED, envs=2, places=3)
    seen = []
    for _ in range(embargo + 2):
        assert (slots.stage == slots.stage[0, 0]).all()
        seen.append(slots.stage[0, 0])
        tick(slots, embargo)
    assert seen == [S.PRUNED, *[S.EMBARGOED] * embargo, S.RESETTING]
    assert (slots.stage == S.DORMANT).all()


def test_a_tick_moves_age_stage_clock_and_alpha_by_one() -> None:
    slots = grown(S.GERMINATED, tempo=3)
    tick(slots)
    transitions.advance(slots, every(slots))
    tick(slots)
    assert (slots.age.item(), slots.epochs_in_stage.item()) == (2, 1)
    transitions.advance(slots, every(slots))
    assert slots.stage == S.BLENDING
    assert slots.alpha == pytest.approx(1 / 3)  # entering takes the first step at once
    tick(slots)
    assert slots.alpha == pytest.approx(2 / 3)
    tick(slots)
    assert slots.alpha == 1.0
    assert slots.steady
    assert (slots.age.item(), slots.epochs_in_stage.item()) == (4, 2)


def test_a_tick_moves_only_the_slots_of_where() -> None:
    """A slot whose seed the governor has removed in this epoch starts its cooldown with the next one."""
    slots = grown(S.PRUNED, places=2)
    transitions.tick(slots, np.array([[True, False]]), 5)
    assert slots.stage.tolist() == [[S.EMBARGOED, S.PRUNED]]
    assert slots.epochs_in_stage.tolist() == [[0, 0]]
    slots = grown(S.TRAINING, envs=2)
    transitions.tick(slots, np.array([[True], [False]]), 5)
    assert slots.age.tolist() == [[1], [0]]
    assert slots.epochs_in_stage.tolist() == [[1], [0]]


def test_a_new_seed_is_what_was_chosen_and_nothing_of_the_one_before() -> None:
    slots = made(
        2,
        2,
        trial=3.0,
        contribution=1.0,
        age=7,
        epochs_in_stage=4,
        alpha_at_tick=0.5,
        vanishing=0.1,
    )
    before = copy.deepcopy(slots)
    where = np.array([[True, False], [False, True]])
    blueprint, style, size = (
        np.array([[2], [3]]),
        np.array([[1], [2]]),
        np.array([[100], [200]]),
    )
    tempo, target = np.array([[3], [8]]), np.array([[0.5], [1.0]])
    transitions.germinate(slots, where, blueprint, style, tempo, target, size)
    for values, chosen in (
        (slots.blueprint, blueprint),
        (slots.style, style),
        (slots.tempo, tempo),
        (slots.incubation_target, target),
        (slots.parameters, size),
    ):
        assert values[where].tolist() == chosen[:, 0].tolist()
    assert (slots.stage[where] == S.GERMINATED).all()
    fresh, chosen_fields = (
        Slots.fresh(),
        {"stage", "blueprint", "style", "tempo", "incubation_target", "parameters"},
    )
    for name, values in slots.arrays().items():
        np.testing.assert_array_equal(values[~where], before.arrays()[name][~where])
        if name not in chosen_fields:
            np.testing.assert_array_equal(values[where], fresh.arrays()[name])


def test_a_faded_prune_takes_holding_back_to_blending_freezes_and_then_removes() -> (
    None
):
    slots = grown(S.HOLDING)
    prune(slots, 3)
    alphas = []
    while slots.stage == S.BLENDING:
        alphas.append(slots.alpha.item())
        assert slots.fading
        assert not slots.learning
        tick(slots)
    assert alphas == pytest.approx([2 / 3, 1 / 3])
    assert slots.stage == S.PRUNED
    assert slots.blueprint == -1
    assert slots.alpha == 0
    assert (
        slots.epochs_in_stage == 0
    )  # entered by the clock: first ticked in the next epoch


@pytest.mark.parametrize("stage", [S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING])
def test_a_prune_at_speed_zero_is_at_once(stage: SeedStage) -> None:
    slots = grown(stage)
    prune(slots, 0)
    assert slots.stage == S.PRUNED
    assert slots.alpha == 0
    assert not slots.fading


@pytest.mark.parametrize("stage", [S.GERMINATED, S.TRAINING])
def test_a_seed_that_is_not_blended_does_not_fade(stage: SeedStage) -> None:
    slots = grown(stage)
    prune(slots, 8)
    assert slots.stage == S.PRUNED


def test_a_lower_target_leaves_holding_and_freezes_while_it_falls() -> None:
    slots = grown(S.HOLDING)
    set_target(slots, 0.5, 3)
    assert slots.stage == S.BLENDING
    assert not slots.learning
    tick(slots)
    tick(slots)
    assert slots.alpha == 0.5
    assert slots.learning
    assert slots.stage == S.BLENDING
    assert slots.blueprint == 1


CHANGES: dict[str, Callable[[Slots], None]] = {
    "germinate": germinate,
    "advance": lambda slots: transitions.advance(slots, every(slots)),
    "fossilize": lambda slots: transitions.fossilize(slots, every(slots)),
    "cut": lambda slots: transitions.cut(slots, every(slots)),
}
LEGAL = {
    "germinate": [S.DORMANT],
    "advance": [S.GERMINATED, S.TRAINING, S.BLENDING],
    "fossilize": [S.HOLDING],
    "cut": [S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", list(SeedStage))
def test_a_change_that_is_not_in_the_table_is_refused_and_changes_nothing(
    stage: SeedStage, change: str
) -> None:
    slots = made(2, 2, stage=stage)
    if stage in LEGAL[change]:
        CHANGES[change](slots)
        assert (slots.stage != stage).all()
        return
    before = copy.deepcopy(slots)
    with pytest.raises(IllegalTransition, match=f"{stage.name} cannot become"):
        CHANGES[change](slots)
    same(slots, before)


def test_a_fossil_is_removed_by_a_rollback_only() -> None:
    slots = grown(S.FOSSILIZED)
    with pytest.raises(IllegalTransition):
        transitions.cut(slots, every(slots))
    assert slots.blueprint == 1
    transitions.revoke(slots, every(slots))
    assert slots.stage == S.PRUNED
    assert slots.blueprint == -1
    assert slots.alpha == 0


@pytest.mark.parametrize(
    "stage", [stage for stage in S if stage not in (S.BLENDING, S.HOLDING)]
)
def test_an_alpha_target_is_set_in_blending_or_holding_only(stage: SeedStage) -> None:
    slots = made(1, 2, stage=S.HOLDING)
    slots.stage[0, 1] = stage
    before = copy.deepcopy(slots)
    with pytest.raises(IllegalTransition, match="in BLENDING or HOLDING"):
        set_target(slots, 0.5, 3)
    same(slots, before)


def test_an_alpha_target_waits_until_alpha_holds() -> None:
    slots = grown(S.HOLDING)
    set_target(slots, 0.5, 3)
    with pytest.raises(IllegalTransition, match="while alpha holds"):
        set_target(slots, 1.0, 3)
