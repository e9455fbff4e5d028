"""Times a candidate against a baseline in alternating turns, and checks their ratio against a bar."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from esper.bench.case import BenchCase

MIN_TURNS = 3
"""Min turns of each side, however long they take."""
STEADY = 1.5
"""Max ratio of the 90th to the 10th percentile of a baseline's turns: above it, it was disturbed, and says nothing."""

_LONG_SECONDS = 0.5


@dataclass(frozen=True)
class Result:
    """One measured comparison. ``ratio`` is baseline / own, for rates own / baseline: above 1 is better.

    ``ratio``, ``value`` and ``baseline_value`` are medians over the turns; low and high are the 10th and 90th
    percentiles. ``met`` is whether the ratio reaches the bar, None without a bar or a usable baseline.
    """

    case: str
    size: str
    device: str
    baseline: str
    ratio: float
    ratio_low: float
    ratio_high: float
    bar: float | None
    unit: str
    value: float
    value_low: float
    value_high: float
    baseline_value: float
    turns: int
    met: bool | None
    usable: bool = True
    """Whether the turns of the baseline are alike."""


def waiting(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Returns ``run``; on a GPU, followed by a synchronization."""
    if device.type == "cpu":
        return run

    def run_and_wait() -> None:
        run()
        torch.cuda.synchronize(device)

    return run_and_wait


def measure(
    comparison: BenchCase,
    rounds: int = 15,
    turn_seconds: float = 0.02,
    max_seconds: float = float("inf"),
) -> Result:
    """Measures both sides in turns, ``rounds`` times, so that a slow moment of the machine affects both.

    The sides alternate in going first. It stops early after ``max_seconds``, but not before ``MIN_TURNS`` turns of
    each. If the turns of the baseline differ by more than ``STEADY``, both are measured once more.
    """
    own_turn = _turn(comparison, comparison.run, turn_seconds)
    other_turn = _turn(comparison, comparison.run_baseline, turn_seconds)
    rounds = min(rounds, comparison.turns or rounds)
    own, other = _turns(own_turn, other_turn, rounds, max_seconds)
    usable = _steady(other)
    if not usable:
        own, other = _turns(own_turn, other_turn, rounds, max_seconds)
        usable = _steady(other)

    is_rate = comparison.unit.endswith("/s")
    ratios = own / other if is_rate else other / own
    ratio_low, ratio, ratio_high = np.quantile(ratios, (0.1, 0.5, 0.9))
    value_low, value, value_high = np.quantile(own, (0.1, 0.5, 0.9))
    met = None
    if comparison.bar is not None and usable:
        met = bool(ratio >= comparison.bar)
    return Result(
        case=comparison.case,
        size=comparison.size,
        device=str(comparison.device),
        baseline=comparison.baseline,
        ratio=float(ratio),
        ratio_low=float(ratio_low),
        ratio_high=float(ratio_high),
        bar=comparison.bar,
        unit=comparison.unit,
        value=float(value),
        value_low=float(value_low),
        value_high=float(value_high),
        baseline_value=float(np.median(other)),
        turns=len(own),
        met=met,
        usable=usable,
    )


def _turns(
    own: Callable[[], float],
    other: Callable[[], float],
    rounds: int,
    max_seconds: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Plays both sides in turns; returns the values of each."""
    start = time.perf_counter()
    own_values: list[float] = []
    other_values: list[float] = []
    for number in range(rounds):
        if number >= MIN_TURNS and time.perf_counter() - start > max_seconds:
            break
        if number % 2 == 0:
            own_values.append(own())
            other_values.append(other())
        else:
            other_values.append(other())
            own_values.append(own())
    return np.array(own_values), np.array(other_values)


def _steady(values: NDArray[np.float64]) -> bool:
    """Whether the turns of a baseline are alike; numbers that are not positive are not times or rates."""
    low, high = np.quantile(values, (0.1, 0.9))
    return bool(low <= 0 or high / low <= STEADY)


def _turn(
    comparison: BenchCase,
    run: Callable[[], object],
    turn_seconds: float,
) -> Callable[[], float]:
    """Returns a warmed-up function that plays one turn and returns its value in the comparison's unit."""
    amount = comparison.amount
    if comparison.unit != "us" and amount is None:
        return cast(Callable[[], float], run)
    run = waiting(run, comparison.device)
    calls = 1
    if _seconds(run, 1) < _LONG_SECONDS:  # a longer call is warm-up enough, and a turn of its own
        _seconds(run, 2)
        seconds = max(_seconds(run, 3), 1e-9)
        calls = max(1, int(turn_seconds / seconds))
    if amount is None:
        return lambda: _seconds(run, calls) * 1e6
    return lambda: amount / _seconds(run, calls)


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls
