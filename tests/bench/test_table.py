"""Rows of the table of results, and its Markdown page."""

from __future__ import annotations

import pytest

from esper.bench.runner import Result
from esper.bench.table import cells, markdown


def result_of(
    value: float, unit: str, bar: float | None = None, ratio: float = 1.0
) -> Result:
    met = None if bar is None else ratio >= bar
    return Result(
        "c",
        "s",
        "cpu",
        "b",
        ratio,
        ratio,
        ratio,
        bar,
        unit,
        value,
        value,
        value,
        2 * value,
        3,
        met,
    )


@pytest.mark.parametrize(
    ("value", "unit", "own", "other"),
    [
        (6.3, "us", "6.30 µs (6.30 to 6.30)", "12.6"),
        (1_234_000.0, "us", "1,234 ms (1,234 to 1,234)", "2,468"),
        (12_345.6, "images/s", "12,346 images/s (12,346 to 12,346)", "24,691"),
        (0.25, "%", "0.25 % (0.25 to 0.25)", "0.50"),
    ],
)
def test_amounts_have_a_unit_and_about_three_digits(
    value: float, unit: str, own: str, other: str
) -> None:
    assert cells(result_of(value, unit))[4:6] == [own, other]


def test_a_page_marks_bars_as_met_or_missed() -> None:
    page = markdown(
        [result_of(1, "us", bar=0.5), result_of(1, "us", bar=2.0), result_of(1, "us")],
        ["a machine"],
    )
    rows = page.splitlines()[-3:]
    assert [row.split("|")[-2].strip() for row in rows] == ["met", "MISSED", ""]
    assert "a machine" in page
