"""Results of two sides' turns. Time is a clock that the tests move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from esper.bench import runner
from esper.bench.case import BenchPair
from esper.bench.runner import measure

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


def numbers(own: float, other: float, unit: str, bar: float | None = None) -> BenchPair:
    return BenchPair(
        "case", "size", CPU, "other", lambda: own, lambda: other, bar, unit
    )


def test_the_ratio_of_times_is_the_speedup(clock: Clock) -> None:
    result = measure(
        BenchPair("c", "s", CPU, "b", clock.taking(1e-3), clock.taking(4e-3), 3.0),
        rounds=5,
    )
    assert (result.value, result.baseline_value, result.ratio) == pytest.approx(
        (1000, 4000, 4)
    )
    assert result.met
    assert result.turns == 5


def test_an_amount_of_work_turns_times_into_rates(clock: Clock) -> None:
    comparison = BenchPair(
        "c",
        "s",
        CPU,
        "b",
        clock.taking(2.0),
        clock.taking(5.0),
        3.0,
        unit="images/s",
        amount=1000,
    )
    result = measure(comparison, rounds=3)
    assert (result.value, result.baseline_value, result.ratio) == pytest.approx(
        (500, 200, 2.5)
    )
    assert result.met is False


@pytest.mark.parametrize(
    ("unit", "ratio"), [("MB", 2.0), ("%", 2.0), ("images/s", 0.5)]
)
def test_a_ratio_above_one_is_better_whatever_the_unit(unit: str, ratio: float) -> None:
    result = measure(numbers(10, 20, unit, bar=1.0))
    assert result.ratio == ratio
    assert result.met is (ratio >= 1)


def test_sides_alternate_in_going_first() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return 1.0

        return run

    measure(
        BenchPair("c", "s", CPU, "b", side("own"), side("other"), None, unit="%"),
        rounds=3,
    )
    assert order == ["own", "other", "other", "own", "own", "other"]


def test_a_long_comparison_gets_three_turns_and_a_single_warm_up(clock: Clock) -> None:
    calls: list[float] = []

    def run() -> None:
        calls.append(clock.now)
        clock.now += 10

    result = measure(
        BenchPair("c", "s", CPU, "b", run, clock.taking(10), None),
        rounds=15,
        max_seconds=30,
    )
    assert result.turns == runner.MIN_TURNS
    assert len(calls) == 1 + runner.MIN_TURNS


def test_a_case_can_limit_its_turns() -> None:
    assert measure(replace(numbers(1, 2, "MB"), turns=1)).turns == 1


def test_the_spread_is_interpolated_between_order_statistics() -> None:
    values = iter([4.0, 1.0, 3.0, 2.0])
    result = measure(
        BenchPair("c", "s", CPU, "b", lambda: next(values), lambda: 6.0, None, "%"),
        rounds=4,
    )
    assert (result.value, result.value_low, result.value_high) == pytest.approx(
        (2.5, 1.3, 3.7)
    )
    assert (result.ratio_low, result.ratio_high) == pytest.approx((1.65, 5.1))


def test_a_baseline_whose_turns_differ_is_measured_again_and_then_not_judged() -> None:
    values = [10.0, 10.0, 30.0] * 2

    def unsteady() -> float:
        return values.pop(0)

    comparison = replace(numbers(10, 20, "MB", bar=1.0), run_baseline=unsteady)
    result = measure(comparison, rounds=3)
    assert not values
    assert (result.usable, result.met) == (False, None)


def test_a_second_try_may_be_steady() -> None:
    values = [10.0, 10.0, 30.0, 20.0, 20.0, 20.0]
    comparison = replace(
        numbers(10, 20, "MB", bar=1.0), run_baseline=lambda: values.pop(0)
    )
    result = measure(comparison, rounds=3)
    assert (result.usable, result.met, result.baseline_value) == (True, True, 20.0)
