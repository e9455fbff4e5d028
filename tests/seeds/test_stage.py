"""The stage table, pair by pair, and the clocks of one slot."""

import itertools

import pytest
import torch

from esper.lifecycle.ramps import STYLES, AlphaCurve
from esper.lifecycle.stage import TRANSITIONS, IllegalTransition, SeedStage, check_transition
from esper.seeds.blueprints import BLUEPRINTS
from esper.seeds.slot import Site, SlotSite, StageChange

S = SeedStage
LEGAL = {
    (S.DORMANT, S.GERMINATED),
    (S.GERMINATED, S.TRAINING),
    (S.GERMINATED, S.PRUNED),
    (S.TRAINING, S.BLENDING),
    (S.TRAINING, S.PRUNED),
    (S.BLENDING, S.HOLDING),
    (S.BLENDING, S.PRUNED),
    (S.HOLDING, S.FOSSILIZED),
    (S.HOLDING, S.BLENDING),
    (S.HOLDING, S.PRUNED),
    (S.PRUNED, S.EMBARGOED),
    (S.EMBARGOED, S.RESETTING),
    (S.RESETTING, S.DORMANT),
}


def make_slot(embargo: int = 5) -> tuple[Site, list[StageChange]]:
    changes: list[StageChange] = []
    return Site(SlotSite("r0c0", 3), embargo, changes.append), changes


def germinated(embargo: int = 5, tempo: int = 3, target: float = 1.0) -> tuple[Site, list[StageChange]]:
    slot, changes = make_slot(embargo)
    slot.germinate(BLUEPRINTS.get("cnn", "norm"), STYLES["LINEAR_ADD"], tempo, target, torch.randn(2, 3, 4, 4))
    return slot, changes


def test_the_values_of_the_stages() -> None:
    assert {stage.name: int(stage) for stage in SeedStage} == {
        "DORMANT": 1,
        "GERMINATED": 2,
        "TRAINING": 3,
        "BLENDING": 4,
        "HOLDING": 6,
        "FOSSILIZED": 7,
        "PRUNED": 8,
        "EMBARGOED": 9,
        "RESETTING": 10,
    }


@pytest.mark.parametrize("value", [0, 5, 11, -1])
def test_unknown_and_retired_values_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="is not a valid SeedStage"):
        SeedStage(value)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SeedStage, SeedStage)))
def test_every_pair_of_stages(before: SeedStage, after: SeedStage) -> None:
    if (before, after) in LEGAL:
        check_transition(before, after)
        return
    with pytest.raises(IllegalTransition) as caught:
        check_transition(before, after)
    named = str(caught.value).partition(";")[2]
    assert all((stage.name in named) == ((before, stage) in LEGAL) for stage in SeedStage)


def test_fossilized_is_final() -> None:
    assert TRANSITIONS[S.FOSSILIZED] == frozenset()


@pytest.mark.trap(8)
@pytest.mark.parametrize("embargo", [1, 5])
def test_cooldown_is_one_embargo_one_and_each_tick_counts_once(embargo: int) -> None:
    slot, changes = germinated(embargo)
    slot.cut("test")
    seen = []
    for _ in range(embargo + 2):
        seen.append(slot.stage)
        slot.tick()
    assert seen == [S.PRUNED, *[S.EMBARGOED] * embargo, S.RESETTING]
    assert slot.stage is S.DORMANT
    assert [change.after for change in changes[1:]] == [S.PRUNED, S.EMBARGOED, S.RESETTING, S.DORMANT]


def test_a_tick_moves_age_stage_clock_and_alpha_by_one() -> None:
    slot, _ = germinated(tempo=3)
    slot.tick()
    slot.advance("test")
    slot.tick()
    assert (slot.age, slot.epochs_in_stage) == (2, 1)
    slot.advance("test")
    assert slot.stage is S.BLENDING
    assert slot.alpha == pytest.approx(1 / 3)  # entering takes the first step at once
    slot.tick()
    assert slot.alpha == pytest.approx(2 / 3)
    slot.tick()
    assert slot.alpha == 1.0
    assert slot.holding
    assert (slot.age, slot.epochs_in_stage) == (4, 2)


def holding() -> tuple[Site, list[StageChange]]:
    slot, changes = germinated(tempo=0)
    for _ in range(3):
        slot.advance("test")
    assert slot.stage is S.HOLDING
    return slot, changes


def test_a_faded_prune_takes_holding_back_to_blending_freezes_and_then_removes() -> None:
    slot, changes = holding()
    slot.prune(3, AlphaCurve.LINEAR, "prune")
    alphas = []
    while slot.stage is S.BLENDING:
        alphas.append(slot.alpha)
        assert slot.fading
        assert not slot.learning
        slot.tick()
    assert alphas == pytest.approx([2 / 3, 1 / 3])
    assert slot.stage is S.PRUNED
    assert slot.seed is None
    assert [(c.before, c.after) for c in changes[-2:]] == [(S.HOLDING, S.BLENDING), (S.BLENDING, S.PRUNED)]
    assert slot.epochs_in_stage == 0  # entered by the clock: first ticked in the next epoch


def test_a_prune_at_speed_zero_is_at_once() -> None:
    slot, _ = holding()
    slot.prune(0, AlphaCurve.LINEAR, "prune")
    assert slot.stage is S.PRUNED
    assert slot.alpha == 0


def test_a_lower_target_leaves_holding_and_freezes_while_it_falls() -> None:
    slot, _ = holding()
    slot.set_alpha_target(0.5, 3, AlphaCurve.LINEAR)
    assert slot.stage is S.BLENDING
    assert not slot.learning
    slot.tick()
    slot.tick()
    assert slot.alpha == 0.5
    assert slot.learning
    assert slot.stage is S.BLENDING
    assert slot.seed is not None


def test_full_target_stays_in_holding() -> None:
    slot, _ = holding()
    slot.set_alpha_target(1.0, 0, AlphaCurve.LINEAR)
    assert slot.stage is S.HOLDING


@pytest.mark.parametrize("stage", [S.DORMANT, S.PRUNED, S.FOSSILIZED])
def test_what_a_stage_has_no_business_with_is_refused(stage: SeedStage) -> None:
    slot, _ = make_slot() if stage is S.DORMANT else holding()
    if stage is S.PRUNED:
        slot.cut("test")
    elif stage is S.FOSSILIZED:
        slot.fossilize()
    with pytest.raises(ValueError, match=slot.name):
        slot.advance("test")
    with pytest.raises(ValueError, match=slot.name):
        slot.set_alpha_target(0.5, 0, AlphaCurve.LINEAR)
    with pytest.raises(IllegalTransition):
        slot.cut("test")
    assert slot.stage is stage
    assert (slot.seed is not None) == (stage is S.FOSSILIZED)


def test_only_a_fossil_can_be_revoked() -> None:
    slot, _ = holding()
    with pytest.raises(ValueError, match="not FOSSILIZED"):
        slot.revoke_fossil()
    slot.fossilize()
    slot.revoke_fossil()
    assert slot.stage is S.PRUNED
    assert slot.seed is None


def test_a_fossil_goes_on_learning() -> None:
    slot, _ = holding()
    slot.fossilize()
    assert slot.learning
    assert slot.blended
