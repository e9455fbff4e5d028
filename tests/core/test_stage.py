"""The stages and the table of transitions, pair by pair."""

import itertools

import pytest

from esper.core.stage import (
    IllegalTransition,
    SeedStage,
    check_transition,
)

S = SeedStage
LEGAL = {
    (S.DORMANT, S.GERMINATED),
    (S.DORMANT, S.BLENDING),
    (S.GERMINATED, S.TRAINING),
    (S.GERMINATED, S.PRUNED),
    (S.TRAINING, S.BLENDING),
    (S.TRAINING, S.PRUNED),
    (S.BLENDING, S.HOLDING),
    (S.BLENDING, S.PRUNED),
    (S.HOLDING, S.FOSSILIZED),
    (S.HOLDING, S.BLENDING),
    (S.HOLDING, S.PRUNED),
    (S.FOSSILIZED, S.DORMANT),
    (S.PRUNED, S.EMBARGOED),
    (S.EMBARGOED, S.RESETTING),
    (S.RESETTING, S.DORMANT),
}


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


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(SeedStage, SeedStage))
)
def test_every_pair_of_stages(before: SeedStage, after: SeedStage) -> None:
    if (before, after) in LEGAL:
        check_transition(before, after)
        return
    with pytest.raises(IllegalTransition) as caught:
        check_transition(before, after)
    named = str(caught.value).partition(";")[2]
    assert all(
        (stage.name in named) == ((before, stage) in LEGAL) for stage in SeedStage
    )
