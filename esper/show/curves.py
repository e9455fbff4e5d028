"""Curves that summarise many hosts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from esper.show.charts import drawable
from esper.show.read import Run, Runs
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
    rows = []
    for x in sorted(values):
        hosts = np.array(values[x])
        low, high = np.percentile(hosts, MIDDLE)
        error = math.nan
        if len(hosts) > 1:
            error = hosts.std(ddof=1) / math.sqrt(len(hosts))
        rows.append((x, hosts.mean(), low, high, error, hosts.min(), hosts.max()))
    columns = list(map(list, zip(*rows, strict=True))) or [[]] * 7
    return Curve(*columns)


def shown_epochs(run: Run) -> tuple[list[EpochCompleted], str]:
    """Returns the epochs that charts by epoch show, and a description of their rounds.

    For an agent that learns, these are of the last quarter of the rounds, which shows what it has become; other
    controllers do not change, so all rounds are shown.
    """
    epochs = run.of(EpochCompleted)
    rounds = sorted({epoch.episode for epoch in epochs})
    if not rounds:
        return [], "no round"
    first = rounds[0]
    last = rounds[-1]
    if run.view.learns:
        first = rounds[-math.ceil(len(rounds) / 4)]
    words = f"round {first + 1}"
    if first < last:
        words = f"rounds {first + 1} to {last + 1}"
    return [epoch for epoch in epochs if epoch.episode >= first], words


def score_of(runs: Runs) -> ScoreUnit:
    """Returns the unit in which the score of all ``runs`` is shown: percentage points if they have different ones."""
    scores = {run.view.score for run in runs}
    if len(scores) == 1:
        return scores.pop()
    return ScoreUnit("score", "pp")


def label(runs: Runs, run: Run, name: str) -> str:
    """Returns the name of a line, with that of its run if several runs are shown."""
    if len(runs) > 1:
        return f"{run.name}: {name}"
    return name


def mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the finite values; None if there is none."""
    finite = []
    for value in values:
        if value is None or not math.isfinite(value):
            continue
        finite.append(value)
    if not finite:
        return None
    return sum(finite) / len(finite)
