"""Time a candidate against a baseline, taking turns, and judge the ratio against a bar."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch


def waiting(run: Callable[[], object], device: str) -> Callable[[], object]:
    """``run``, and on CUDA a wait for its result."""
    if device == "cpu":
        return run

    def run_and_wait() -> None:
        run()
        torch.cuda.synchronize()

    return run_and_wait


@dataclass(frozen=True)
class Comparison:
    """Two ways to do the same work. Both callables must wait for their result (a CUDA one synchronizes).

    Their time is taken, in ``unit`` "us"; with another unit they return the number that is compared.
    """

    case: str
    size: str
    device: str
    baseline: str
    run: Callable[[], object]
    run_baseline: Callable[[], object]
    bar: float | None  # the ratio it must reach; None where it is only reported
    unit: str = "us"


@dataclass(frozen=True)
class Result:
    """One measured comparison. ``ratio`` is baseline / own: above 1 is faster, or smaller."""

    case: str
    size: str
    device: str
    baseline: str
    ratio: float  # median over the rounds
    ratio_low: float  # 10th percentile
    ratio_high: float  # 90th percentile
    bar: float | None
    unit: str
    value: float  # own median
    value_low: float
    value_high: float
    baseline_value: float

    @property
    def met(self) -> bool | None:
        """Whether the median ratio reaches the bar; None without a bar."""
        return None if self.bar is None else self.ratio >= self.bar

    def as_json(self) -> dict[str, Any]:
        """The fields and ``met``, ready for ``json.dump``."""
        return {**asdict(self), "met": self.met}


def percentile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the order statistics; ``fraction`` 0 is the smallest, 1 the largest."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def _calls_for(run: Callable[[], object], round_seconds: float) -> int:
    """How many calls fill about ``round_seconds``; its calls are the warm-up."""
    for _ in range(3):
        run()
    return max(1, int(round_seconds / max(_seconds(run, 3), 1e-9)))


def measure(comparison: Comparison, rounds: int = 15, round_seconds: float = 0.02) -> Result:
    """Time both sides in turns, ``rounds`` times, so that a slow moment of the machine hits both."""
    if comparison.unit != "us":
        return _result(comparison, [cast(float, comparison.run())], [cast(float, comparison.run_baseline())])
    calls = _calls_for(comparison.run, round_seconds)
    baseline_calls = _calls_for(comparison.run_baseline, round_seconds)
    own: list[float] = []
    other: list[float] = []
    for _ in range(rounds):
        own.append(_seconds(comparison.run, calls) * 1e6)
        other.append(_seconds(comparison.run_baseline, baseline_calls) * 1e6)
    return _result(comparison, own, other)


def _result(comparison: Comparison, own: list[float], other: list[float]) -> Result:
    ratios = [b / a for a, b in zip(own, other, strict=True)]
    return Result(
        case=comparison.case,
        size=comparison.size,
        device=comparison.device,
        baseline=comparison.baseline,
        ratio=statistics.median(ratios),
        ratio_low=percentile(ratios, 0.1),
        ratio_high=percentile(ratios, 0.9),
        bar=comparison.bar,
        unit=comparison.unit,
        value=statistics.median(own),
        value_low=percentile(own, 0.1),
        value_high=percentile(own, 0.9),
        baseline_value=statistics.median(other),
    )
