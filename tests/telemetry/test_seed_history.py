"""The seeds of one host, read from its events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from esper.telemetry.event import ActionTaken, EpochCompleted, StageChanged
from esper.telemetry.seed_history import Life


def change(
    epoch: int, before: str, after: str, cause: str = "advance", slot: str = "r0c0"
) -> StageChanged:
    return StageChanged(0, 0, epoch, slot, "norm", before, after, cause)


def epoch(
    number: int, stages: dict[str, str], contributions: dict[str, float]
) -> EpochCompleted:
    errors = dict.fromkeys(contributions, 0.5)
    measured: list[Any] = [1.0, 50.0, 1.0, 50.0, 50.0, 50.0, 300, 0]
    return EpochCompleted(
        0, 0, number, *measured, contributions, stages, 0.0, {}, errors
    )


def lived(*events: Any) -> Life:
    found = Life(0, 0)
    for event in events:
        found.handle(event)
    return found


def test_a_seed_is_followed_from_its_germination_to_its_end() -> None:
    found = lived(
        change(2, "DORMANT", "GERMINATED", "germinate"),
        change(3, "GERMINATED", "TRAINING"),
        ActionTaken(
            0,
            0,
            4,
            "ADVANCE",
            "r0c0",
            None,
            False,
            "gradient health: 0.1, at least 0.7 required",
        ),
        ActionTaken(
            0,
            0,
            5,
            "ADVANCE",
            "r0c0",
            None,
            False,
            "trial accuracy difference: -3, at least -1 required",
        ),
        change(6, "TRAINING", "PRUNED", "prune"),
        change(7, "PRUNED", "EMBARGOED", "cooldown"),
    )
    (seed,) = found.seeds
    assert (seed.planted, seed.until, seed.stage, seed.refusals) == (
        2,
        6,
        "TRAINING",
        2,
    )
    assert seed.end == (
        "pruned by the controller at epoch 6, in TRAINING; a gate refused it 2 times, last: trial accuracy difference: "
        "-3, at least -1 required"
    )


def test_a_seed_that_is_kept_at_once_is_followed_too() -> None:
    kept = change(3, "DORMANT", "FOSSILIZED", "germinate")
    found = lived(
        kept,
        replace(epoch(4, {"r0c0": "FOSSILIZED"}, {"r0c0": 2.5}), fossil_parameters=120),
    )
    (seed,) = found.seeds
    assert (seed.planted, seed.kept, seed.blended, seed.parameters) == (
        3,
        True,
        True,
        120,
    )
    assert (seed.contribution, seed.contribution_kept) == (
        2.5,
        None,
    )  # it was kept before anything was measured
    assert [(each.stage, each.begin, each.end) for each in found.stretches] == [
        ("FOSSILIZED", 3, 4)
    ]


def test_a_seed_that_is_still_there_says_what_it_stands_before() -> None:
    found = lived(
        change(1, "DORMANT", "GERMINATED"),
        change(2, "GERMINATED", "TRAINING"),
        epoch(3, {"r0c0": "TRAINING"}, {}),
    )
    (seed,) = found.seeds
    assert found.present == {"r0c0": seed}
    seed.standing = "gate G2 was closed"
    assert (seed.until, seed.kept, seed.end) == (
        3,
        False,
        "in TRAINING at the end: gate G2 was closed",
    )


def test_an_action_on_a_slot_whose_seed_is_gone_is_not_a_refusal_of_that_seed() -> None:
    found = lived(
        change(1, "DORMANT", "GERMINATED"),
        change(2, "GERMINATED", "PRUNED", "prune"),
        ActionTaken(0, 0, 3, "ADVANCE", "r0c0", None, False, "no seed"),
        ActionTaken(
            0, 0, 4, "GERMINATE", "r0c0", "norm", False, "the slot is not free"
        ),
    )
    assert [seed.refusals for seed in found.seeds] == [0]
    assert found.refused == {"norm": 1}


def test_a_slot_has_every_stage_from_change_to_change() -> None:
    found = lived(
        change(2, "DORMANT", "GERMINATED"),
        change(3, "GERMINATED", "TRAINING"),
        change(5, "TRAINING", "PRUNED"),
        change(6, "PRUNED", "EMBARGOED"),
        change(8, "EMBARGOED", "DORMANT"),
        change(9, "DORMANT", "GERMINATED"),
        change(4, "DORMANT", "GERMINATED", slot="r0c1"),
        *(epoch(number, {}, {}) for number in range(1, 11)),
    )
    assert [(s.slot, s.stage, s.begin, s.end) for s in found.stretches] == [
        ("r0c0", "GERMINATED", 2, 3),
        ("r0c0", "TRAINING", 3, 5),
        ("r0c0", "PRUNED", 5, 6),
        ("r0c0", "EMBARGOED", 6, 8),
        ("r0c0", "GERMINATED", 9, 10),
        ("r0c1", "GERMINATED", 4, 10),
    ]


def in_layers(number: int, merges: int, width: float) -> EpochCompleted:
    """The report of an epoch with this number of merged seeds in a layer of this width."""
    widths = {} if width == 1 else {"r0c0": width}
    return replace(
        epoch(number, {}, {}),
        merges={"r0c0": merges} if merges else {},
        widths=widths,
    )


GROWN = (
    change(0, "DORMANT", "FOSSILIZED", "germinate"),
    in_layers(1, 0, 1.0),
    change(1, "FOSSILIZED", "DORMANT", "merged"),
    in_layers(2, 1, 2.0),
    change(2, "DORMANT", "FOSSILIZED", "germinate"),
    in_layers(3, 1, 2.0),
    change(3, "FOSSILIZED", "DORMANT", "merged"),
    in_layers(4, 2, 3.0),
)
FADING = (
    *GROWN,
    change(4, "DORMANT", "BLENDING", "shrink"),
    in_layers(5, 1, 2.0),
)


def test_units_that_are_taken_out_of_a_layer_are_no_longer_kept() -> None:
    found = lived(*FADING)
    first, second = found.seeds
    assert (first.kept, second.kept) == (True, False)
    assert found.present == {"r0c0": second}
    found.handle(change(6, "BLENDING", "PRUNED", "faded"))
    found.handle(change(8, "PRUNED", "DORMANT", "cooldown"))
    found.handle(in_layers(9, 1, 2.0))
    assert second.end == "merged at epoch 3, taken out of its layer from epoch 4 on"
    assert second.removed == "taken out of its layer by the controller"
    assert not found.present
    assert [(s.stage, s.begin, s.end, s.width) for s in found.stretches] == [
        ("FOSSILIZED", 0, 1, None),
        ("MERGED", 1, 2, 2.0),
        ("FOSSILIZED", 2, 3, None),
        ("MERGED", 3, 4, 3.0),
        ("BLENDING", 4, 6, None),
        ("PRUNED", 6, 8, None),
        ("MERGED", 8, 9, 2.0),
    ]
    assert "r0c0: its layer, ×3, from epoch 3 to 4" in found.words()


def test_units_that_go_at_once_leave_no_seed_behind() -> None:
    found = lived(*GROWN, change(4, "DORMANT", "PRUNED", "shrink"))
    assert not found.present
    assert [seed.kept for seed in found.seeds] == [True, False]


def test_a_rollback_puts_units_back_into_their_layer() -> None:
    found = lived(
        *FADING,
        change(6, "BLENDING", "PRUNED", "rollback"),
        in_layers(6, 2, 3.0),
    )
    assert [seed.kept for seed in found.seeds] == [True, True]
    assert found.seeds[1].end == "kept at epoch 2, merged at epoch 3"
