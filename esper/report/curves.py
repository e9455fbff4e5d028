"""Curves that summarise many hosts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from esper.report.charts import drawable
from esper.report.read import Run
from esper.telemetry.event import EpochCompleted
from esper.telemetry.score import ScoreUnit

MIDDLE = (10, 90)
"""Percentiles that bound the middle 80 % of the hosts."""
NORMAL = 1.96
"""Half-width of a 95 % interval, in standard errors."""


@dataclass(frozen=True)
class Curve:
    """By epoch: mean, bounds of the middle 80 % of the hosts, extremes, and standard error of the mean."""

    x: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    error: list[float]
    worst: list[float]
    best: list[float]


def by_epoch(epochs: Iterable[EpochCompleted], value: Callable[[EpochCompleted], float | None]) -> Curve:
    """Returns the curve of ``value`` over ``epochs``; values that cannot be drawn are left out."""
    values: dict[int, list[float]] = defaultdict(list)
    for epoch in epochs:
        number = value(epoch)
        if number is not None and drawable(number):
            values[epoch.epoch].append(number)
    numbers = sorted(values)
    columns = [np.array(values[number]) for number in numbers]
    return Curve(
        x=numbers,
        mean=[c.mean() for c in columns],
        low=[np.percentile(c, MIDDLE[0]) for c in columns],
        high=[np.percentile(c, MIDDLE[1]) for c in columns],
        error=[c.std(ddof=1) / math.sqrt(len(c)) if len(c) > 1 else math.nan for c in columns],
        worst=[c.min() for c in columns],
        best=[c.max() for c in columns],
    )


def shown_epochs(run: Run) -> tuple[list[EpochCompleted], str]:
    """Returns the epochs that charts by epoch show, and a description of their rounds.

    For an agent that learns, these are of the last quarter of the rounds, which shows what it has become; other
    controllers do not change, so all rounds are shown.
    """
    epochs = run.of(EpochCompleted)
    rounds = sorted({epoch.episode for epoch in epochs})
    if not rounds:
        return [], "no round"
    first = rounds[-math.ceil(len(rounds) / 4)] if run.learns else rounds[0]
    words = f"rounds {first + 1} to {rounds[-1] + 1}" if first < rounds[-1] else f"round {first + 1}"
    return [epoch for epoch in epochs if epoch.episode >= first], words


def score_of(runs: Sequence[Run]) -> ScoreUnit:
    """Returns how the score of all ``runs`` is shown: in percentage points if they have different ones."""
    scores = {run.view.score for run in runs}
    return scores.pop() if len(scores) == 1 else ScoreUnit("score", "pp")


def label(runs: Sequence[Run], run: Run, name: str) -> str:
    """Returns the name of a line, with that of its run if several runs are shown."""
    return f"{run.name}: {name}" if len(runs) > 1 else name


def mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the finite values; None if there is none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
