"""Comparisons of arms in a folder that goes afterwards, with the seconds that each arm took."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.compare.arms import read_arms
from esper.compare.comparison_run import ComparisonRun
from esper.compare.runner import HostResult
from esper.data.task import Task
from esper.telemetry.event import ArmPlayed, ScoreDefined


class Clock:
    """Adds up the seconds that each arm took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def __call__(self, event: ArmPlayed | ScoreDefined) -> None:
        now = time.perf_counter()
        if isinstance(event, ArmPlayed):
            self.seconds[event.controller] += now - self._last
        self._last = now


def compared(
    texts: Sequence[str],
    base: Mapping[str, Any],
    pairs: int,
    task: Task,
    folder: Path,
) -> tuple[dict[str, list[HostResult]], dict[str, float]]:
    """Plays arms beside the first of them; returns the hosts of each, and its seconds."""
    clock = Clock()
    read = read_arms(texts, dict(base))
    run = ComparisonRun(
        read,
        pairs,
        folder / "out",
        reference=read[0].name,
        progress=clock,
        task=task,
    )
    return run.run().hosts, clock.seconds
