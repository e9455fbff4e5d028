"""Rounds of arms: their order, their pairs, and results of hosts."""

from __future__ import annotations

import pytest

from tests.compare.tiny_comparisons import compare


@pytest.mark.finding("M14")
def test_rounds_are_interleaved_in_random_order() -> None:
    arms, events = compare(["none", "random"], 12)
    assert {event.rounds for event in events} == {6}
    for name, arm in arms.items():
        means = [event.test_accuracy for event in events if event.controller == name]
        assert means == pytest.approx(arm.accuracy.reshape(6, 2).mean(axis=1))
    played = [(event.round, event.controller) for event in events]
    assert [number for number, _ in played] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    orders = [(played[i][1], played[i + 1][1]) for i in range(0, 12, 2)]
    assert set(orders) == {("none", "random"), ("random", "none")}


@pytest.mark.parametrize("pairs", [1, 3, 4])
def test_every_arm_has_exactly_the_pairs_asked_for(pairs: int) -> None:
    arms, _ = compare(["none", "random"], pairs)
    for arm in arms.values():
        assert [
            len(values) for values in (arm.accuracy, arm.parameters, arm.fossils)
        ] == [pairs] * 3
