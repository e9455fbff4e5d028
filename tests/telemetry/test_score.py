"""Scores in the unit of their task."""

from __future__ import annotations

import pytest

from esper.telemetry.score import ACCURACY, ScoreUnit

R2 = ScoreUnit("r2", "", "", 100.0)
KELVIN = ScoreUnit("negative error", "K", "K", 10.0)


@pytest.mark.parametrize(
    ("unit", "value", "difference", "label"),
    [
        (ACCURACY, "83.4 %", "+1.3 pp", "test, %"),
        (R2, "0.834", "+0.013", "test"),
        (KELVIN, "8.34 K", "+0.13 K", "test, K"),
    ],
)
def test_points_are_shown_in_the_unit_of_the_score(
    unit: ScoreUnit, value: str, difference: str, label: str
) -> None:
    assert (unit.value(83.41, 1), unit.difference(1.31, 1), unit.label("test")) == (
        value,
        difference,
        label,
    )
    assert unit.value(83.41, 1, unit=False) == value.partition(" ")[0]


def test_what_was_not_measured_is_said_in_words() -> None:
    assert ACCURACY.value(None) == "not measured"
    assert R2.difference(float("nan")) == "not a number"


def test_a_difference_that_rounds_to_zero_has_no_minus() -> None:
    assert ACCURACY.difference(-0.001) == "+0.00 pp"
    assert R2.value(-1e-9) == "0.0000"
