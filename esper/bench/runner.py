"""Times a candidate against a baseline in alternating turns, and checks their ratio against a bar."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch

MIN_TURNS = 3
"""Min turns of each side, however long they take."""

_LONG_SECONDS = 0.5


def waiting(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Returns ``run``; on a GPU, followed by a synchronization."""
    if device.type == "cpu":
        return run

    def run_and_wait() -> None:
        run()
        torch.cuda.synchronize(device)

    return run_and_wait


@dataclass(frozen=True)
class BenchCase:
    """Two ways to do the same work; calls that are timed are followed by a synchronization of ``device``.

    What is compared depends on the unit:

    - ``us``: the time per call.
    - with ``amount``: the rate at which calls do that much work; the unit is a rate such as ``images/s``.
    - otherwise: the numbers that the callables return.
    """

    case: str
    size: str
    device: torch.device
    baseline: str
    run: Callable[[], object]
    run_baseline: Callable[[], object]
    bar: float | None  # min ratio; None: only reported
    unit: str = "us"
    amount: float | None = None
    turns: int | None = None  # max turns of each side; None: no limit of its own

    @property
    def timed(self) -> bool:
        """Whether calls are timed."""
        return self.unit == "us" or self.amount is not None

    @property
    def more_is_better(self) -> bool:
        """Whether higher values are better: true for rates, not for times, shares and memory."""
        return self.unit.endswith("/s")


@dataclass(frozen=True)
class Result:
    """One measured comparison. ``ratio`` is baseline / own, for rates own / baseline: above 1 is better."""

    case: str
    size: str
    device: str
    baseline: str
    ratio: float  # median over the turns
    ratio_low: float  # 10th percentile
    ratio_high: float  # 90th percentile
    bar: float | None
    unit: str
    value: float  # own median
    value_low: float
    value_high: float
    baseline_value: float
    turns: int

    @property
    def met(self) -> bool | None:
        """Whether the median ratio reaches the bar; None without a bar."""
        return None if self.bar is None else self.ratio >= self.bar

    def as_json(self) -> dict[str, Any]:
        """Returns the fields and ``met``, ready for ``json.dump``."""
        return {**asdict(self), "met": self.met}


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def _calls_for(run: Callable[[], object], turn_seconds: float) -> int:
    """Returns the number of calls that fill about ``turn_seconds``.

    The calls made here are the warm-up: a single one if calls are long.
    """
    if _seconds(run, 1) >= _LONG_SECONDS:
        return 1
    _seconds(run, 2)
    return max(1, int(turn_seconds / max(_seconds(run, 3), 1e-9)))


def _turn(comparison: BenchCase, run: Callable[[], object], turn_seconds: float) -> Callable[[], float]:
    """Returns a warmed-up function that plays one turn and returns its value in the comparison's unit."""
    if not comparison.timed:
        return cast(Callable[[], float], run)
    run = waiting(run, comparison.device)
    calls, amount = _calls_for(run, turn_seconds), comparison.amount
    if amount is not None:
        return lambda: amount / _seconds(run, calls)
    return lambda: _seconds(run, calls) * 1e6


def measure(
    comparison: BenchCase, rounds: int = 15, turn_seconds: float = 0.02, max_seconds: float = float("inf")
) -> Result:
    """Measures both sides in turns, ``rounds`` times, so that a slow moment of the machine affects both.

    The sides alternate in going first. It stops early after ``max_seconds``, but not before ``MIN_TURNS`` turns of
    each.
    """
    start = time.perf_counter()
    rounds = min(rounds, comparison.turns or rounds)
    sides = [_turn(comparison, run, turn_seconds) for run in (comparison.run, comparison.run_baseline)]
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        if number >= MIN_TURNS and time.perf_counter() - start > max_seconds:
            break
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            found[side].append(sides[side]())
    return _result(comparison, *found)


def _result(comparison: BenchCase, own: list[float], other: list[float]) -> Result:
    pairs = zip(own, other, strict=True)
    ratios = [a / b if comparison.more_is_better else b / a for a, b in pairs]
    (ratio_low, ratio_high), (low, high) = (np.quantile(values, (0.1, 0.9)).tolist() for values in (ratios, own))
    return Result(
        case=comparison.case,
        size=comparison.size,
        device=str(comparison.device),
        baseline=comparison.baseline,
        ratio=statistics.median(ratios),
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        bar=comparison.bar,
        unit=comparison.unit,
        value=statistics.median(own),
        value_low=low,
        value_high=high,
        baseline_value=statistics.median(other),
        turns=len(own),
    )
