"""Times a candidate against a baseline in alternating turns, and checks their ratio against a bar."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.bench.case import BenchPair

MIN_TURNS = 3
"""Min turns of each side, however long they take."""
STEADY = 1.5
"""Max ratio of the 90th to the 10th percentile of a baseline's turns: above it, it was disturbed, and says nothing."""
TURN_SECONDS = 0.02
"""Seconds of a turn, unless one call takes longer."""
LONG_SECONDS = 0.5
"""Seconds of a call that is warm-up enough, and a turn by itself."""


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


def measure(comparison: BenchPair, rounds: int = 15, max_seconds: float = float("inf")) -> Result:
    """Measures both sides in turns, ``rounds`` times, so that a slow moment of the machine affects both.

    It stops early after ``max_seconds``, but not before ``MIN_TURNS`` turns of each. If the turns of the baseline
    differ by more than ``STEADY``, both are measured once more.
    """
    sides = (_turn(comparison, comparison.run), _turn(comparison, comparison.run_baseline))
    rounds = min(rounds, comparison.turns or rounds)
    own, other = _turns(sides, rounds, max_seconds)
    if not _steady(other):
        own, other = _turns(sides, rounds, max_seconds)
    usable = _steady(other)

    ratios = other / own
    if comparison.unit.endswith("/s"):
        ratios = own / other
    ratio_low, ratio, ratio_high = np.quantile(ratios, (0.1, 0.5, 0.9)).tolist()
    value_low, value, value_high = np.quantile(own, (0.1, 0.5, 0.9)).tolist()
    met = None
    if comparison.bar is not None and usable:
        met = bool(ratio >= comparison.bar)
    return Result(
        case=comparison.case,
        size=comparison.size,
        device=str(comparison.device),
        baseline=comparison.baseline,
        ratio=ratio,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        bar=comparison.bar,
        unit=comparison.unit,
        value=value,
        value_low=value_low,
        value_high=value_high,
        baseline_value=float(np.median(other)),
        turns=len(own),
        met=met,
        usable=usable,
    )


def _turns(
    sides: tuple[Callable[[], float], Callable[[], float]],
    rounds: int,
    max_seconds: float,
) -> NDArray[np.float64]:
    """Plays both sides in turns, which alternate in going first; returns their values, [2, turns]."""
    start = time.perf_counter()
    values: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        if number >= MIN_TURNS and time.perf_counter() - start > max_seconds:
            break
        for side in (number % 2, 1 - number % 2):
            values[side].append(sides[side]())
    return np.array(values)


def _steady(values: NDArray[np.float64]) -> bool:
    """Whether the turns of a baseline are alike; numbers that are not positive are not times or rates."""
    low, high = np.quantile(values, (0.1, 0.9))
    return bool(low <= 0 or high / low <= STEADY)


def _turn(comparison: BenchPair, run: Callable[[], Any]) -> Callable[[], float]:
    """Returns a warmed-up function that plays one turn and returns its value in the comparison's unit."""
    amount = comparison.amount
    if comparison.unit != "us" and amount is None:
        return run

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
            if comparison.device.type == "cuda":
                torch.cuda.synchronize(comparison.device)
        return (time.perf_counter() - start) / calls

    calls = 1
    if seconds(1) < LONG_SECONDS:
        seconds(2)
        calls = max(1, int(TURN_SECONDS / max(seconds(3), 1e-9)))
    if amount is None:
        return lambda: seconds(calls) * 1e6
    return lambda: amount / seconds(calls)
