"""What is made of two sides' turns. Time is a clock that the tests move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from esper.bench import runner
from esper.bench.runner import BenchCase, Result, measure
from esper.bench.table import cells, markdown

CPU = torch.device("cpu")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(runner.time, "perf_counter", lambda: self.now)

    def taking(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def numbers(own: float, other: float, unit: str, bar: float | None = None) -> BenchCase:
    return BenchCase("case", "size", CPU, "other", lambda: own, lambda: other, bar, unit)


def test_of_times_the_ratio_is_how_much_faster_the_own_side_is(clock: Clock) -> None:
    result = measure(BenchCase("c", "s", CPU, "b", clock.taking(1e-3), clock.taking(4e-3), 3.0), rounds=5)
    assert (result.value, result.baseline_value, result.ratio) == pytest.approx((1000, 4000, 4))
    assert result.met
    assert result.turns == 5


def test_an_amount_of_work_makes_times_rates(clock: Clock) -> None:
    comparison = BenchCase("c", "s", CPU, "b", clock.taking(2.0), clock.taking(5.0), 3.0, unit="images/s", amount=1000)
    result = measure(comparison, rounds=3)
    assert (result.value, result.baseline_value, result.ratio) == pytest.approx((500, 200, 2.5))
    assert result.met is False


@pytest.mark.parametrize(("unit", "ratio"), [("MB", 2.0), ("%", 2.0), ("images/s", 0.5)])
def test_a_ratio_above_one_is_better_whatever_the_unit(unit: str, ratio: float) -> None:
    result = measure(numbers(10, 20, unit, bar=1.0))
    assert result.ratio == ratio
    assert result.met is (ratio >= 1)


def test_sides_take_turns_in_going_first() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return 1.0

        return run

    measure(BenchCase("c", "s", CPU, "b", side("own"), side("other"), None, unit="%"), rounds=3)
    assert order == ["own", "other", "other", "own", "own", "other"]


def test_a_long_comparison_gets_three_turns_and_a_single_warm_up(clock: Clock) -> None:
    calls: list[float] = []

    def run() -> None:
        calls.append(clock.now)
        clock.now += 10

    result = measure(BenchCase("c", "s", CPU, "b", run, clock.taking(10), None), rounds=15, max_seconds=30)
    assert result.turns == runner.MIN_TURNS
    assert len(calls) == 1 + runner.MIN_TURNS


def test_what_is_the_same_every_time_is_asked_once() -> None:
    assert measure(replace(numbers(1, 2, "MB"), turns=1)).turns == 1


def test_the_spread_lies_between_the_order_statistics() -> None:
    values = iter([4.0, 1.0, 3.0, 2.0])
    result = measure(BenchCase("c", "s", CPU, "b", lambda: next(values), lambda: 6.0, None, "%"), rounds=4)
    assert (result.value, result.value_low, result.value_high) == pytest.approx((2.5, 1.3, 3.7))
    assert (result.ratio_low, result.ratio_high) == pytest.approx((1.65, 5.1))


def result_of(value: float, unit: str, bar: float | None = None, ratio: float = 1.0) -> Result:
    return Result("c", "s", "cpu", "b", ratio, ratio, ratio, bar, unit, value, value, value, 2 * value, 3)


@pytest.mark.parametrize(
    ("value", "unit", "own", "other"),
    [
        (6.3, "us", "6.30 µs (6.30 to 6.30)", "12.6"),
        (1_234_000.0, "us", "1,234 ms (1,234 to 1,234)", "2,468"),
        (12_345.6, "images/s", "12,346 images/s (12,346 to 12,346)", "24,691"),
        (0.25, "%", "0.25 % (0.25 to 0.25)", "0.50"),
    ],
)
def test_amounts_are_short(value: float, unit: str, own: str, other: str) -> None:
    assert cells(result_of(value, unit))[4:6] == [own, other]


def test_a_page_marks_bars_that_were_met_and_missed() -> None:
    page = markdown([result_of(1, "us", bar=0.5), result_of(1, "us", bar=2.0), result_of(1, "us")], ["a machine"])
    rows = page.splitlines()[-3:]
    assert [row.split("|")[-2].strip() for row in rows] == ["met", "MISSED", ""]
    assert "a machine" in page
