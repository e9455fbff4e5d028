"""The seeds of one host, read from its events."""

from __future__ import annotations

from typing import Any

from esper.telemetry.event import ActionTaken, EpochCompleted, StageChanged
from esper.telemetry.seeds_tried import SeedsTried


def change(epoch: int, before: str, after: str, cause: str = "advance", slot: str = "r0c0") -> StageChanged:
    return StageChanged(0, 0, epoch, slot, "norm", before, after, cause)


def epoch(number: int, stages: dict[str, str], contributions: dict[str, float]) -> EpochCompleted:
    errors = dict.fromkeys(contributions, 0.5)
    measured: list[Any] = [1.0, 50.0, 1.0, 50.0, 50.0, 50.0, 300, 0]
    return EpochCompleted(0, 0, number, *measured, contributions, stages, 0.0, {}, errors)


def tried(*events: Any) -> SeedsTried:
    found = SeedsTried()
    for event in events:
        found.handle(event)
    return found


def test_a_seed_is_followed_from_its_germination_to_its_end() -> None:
    found = tried(
        change(2, "DORMANT", "GERMINATED", "germinate"),
        change(3, "GERMINATED", "TRAINING"),
        ActionTaken(0, 0, 4, "ADVANCE", "r0c0", None, False, "gradient health: 0.1, at least 0.7 required"),
        ActionTaken(0, 0, 5, "ADVANCE", "r0c0", None, False, "trial accuracy difference: -3, at least -1 required"),
        change(6, "TRAINING", "PRUNED", "prune"),
        change(7, "PRUNED", "EMBARGOED", "cooldown"),
    )
    (seed,) = found.seeds
    assert (seed.planted, seed.until, seed.stage, seed.refusals) == (2, 6, "TRAINING", 2)
    assert seed.end == (
        "pruned by the controller at epoch 6, in TRAINING; a gate refused it 2 times, last: trial accuracy difference: "
        "-3, at least -1 required"
    )


def test_a_slot_that_is_used_again_has_two_seeds() -> None:
    found = tried(
        change(1, "DORMANT", "GERMINATED"),
        change(2, "GERMINATED", "PRUNED", "not finite"),
        change(4, "RESETTING", "DORMANT", "cooldown"),
        change(5, "DORMANT", "GERMINATED"),
        change(9, "HOLDING", "FOSSILIZED", "fossilize"),
        epoch(10, {"r0c0": "FOSSILIZED"}, {"r0c0": 1.25}),
    )
    assert [seed.end for seed in found.seeds] == [
        "removed because a value was not finite at epoch 2, in GERMINATED",
        "kept at epoch 9",
    ]
    assert str(found.seeds[1]).endswith("kept at epoch 9, contribution +1.25 pp (standard error 0.50)")


def test_a_seed_that_is_still_there_says_what_it_stands_before() -> None:
    found = tried(
        change(1, "DORMANT", "GERMINATED"), change(2, "GERMINATED", "TRAINING"), epoch(3, {"r0c0": "TRAINING"}, {})
    )
    found.stand("r0c0", "gate G2 was closed")
    found.stand("r0c1", "nobody is there")
    (seed,) = found.seeds
    assert (seed.until, seed.kept, seed.end) == (3, False, "in TRAINING at the end: gate G2 was closed")
