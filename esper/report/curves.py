"""Curves that summarise many hosts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from esper.report.read import Run
from esper.report.svg import drawable
from esper.telemetry.event import EpochCompleted

MIDDLE = (10, 90)
"""Percentiles that bound the middle 80 % of the hosts."""
NORMAL = 1.96
"""Half-width of a 95 % interval, in standard errors."""


@dataclass(frozen=True)
class Curve:
    """By epoch: mean, bounds of the middle 80 % of the hosts, standard error of the mean, and number of hosts."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    error: list[float]
    hosts: list[int]


def by_epoch(epochs: Iterable[EpochCompleted], value: Callable[[EpochCompleted], float | None]) -> Curve:
    """Returns the curve of ``value`` over ``epochs``; values that cannot be drawn are left out."""
    found: dict[int, list[float]] = defaultdict(list)
    for epoch in epochs:
        number = value(epoch)
        if number is not None and drawable(number):
            found[epoch.epoch].append(number)
    places = sorted(found)
    columns = [np.array(found[place]) for place in places]
    return Curve(
        x=[float(place) for place in places],
        mean=[float(c.mean()) for c in columns],
        low=[float(np.percentile(c, MIDDLE[0])) for c in columns],
        high=[float(np.percentile(c, MIDDLE[1])) for c in columns],
        error=[float(c.std(ddof=1) / math.sqrt(len(c))) if len(c) > 1 else math.nan for c in columns],
        hosts=[len(c) for c in columns],
    )


def shown_rounds(run: Run) -> tuple[set[int], str]:
    """Returns the rounds, counted from 0, that charts by epoch show, and their description.

    For an agent that learns, these are the last quarter, which shows what it has become; other controllers do not
    change, so all rounds are shown.
    """
    rounds = sorted({epoch.episode for epoch in run.of(EpochCompleted)})
    if not rounds:
        return set(), "no round"
    chosen = rounds[-max(1, math.ceil(len(rounds) / 4)) :] if run.learns else rounds
    if len(chosen) == 1:
        return set(chosen), f"round {chosen[0] + 1}"
    return set(chosen), f"rounds {chosen[0] + 1} to {chosen[-1] + 1}"


def epochs_of(run: Run, rounds: set[int]) -> list[EpochCompleted]:
    return [epoch for epoch in run.of(EpochCompleted) if epoch.episode in rounds]


def episodes(run: Run) -> dict[tuple[int, int], list[EpochCompleted]]:
    """Returns the epochs of every host, by (episode, env)."""
    found: dict[tuple[int, int], list[EpochCompleted]] = defaultdict(list)
    for epoch in run.of(EpochCompleted):
        found[epoch.episode, epoch.env].append(epoch)
    return dict(sorted(found.items()))
