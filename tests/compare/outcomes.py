"""Results of comparisons with known differences, and the report of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

from rich.console import Console

from esper.compare.analysis import METRICS, Metric, analyse
from esper.compare.arms import Arm
from esper.compare.comparison import ComparisonResult
from esper.compare.runner import HostResult
from esper.compare.table import write_report
from esper.config import TrainingConfig


def host(
    accuracy: float, number: int, parameters: float = 277.0, loss: float = 0.5
) -> HostResult:
    return HostResult(
        accuracy, loss + number / 100, parameters, 277.0, 1.5e9, 30.0, 0.0, 1.0
    )


def nearly(gain: float, number: int) -> float:
    """The gain of pair ``number``: without any spread there would be no verdict."""
    return gain * (1.001 if number % 2 else 0.999)


def outcome(
    folder: Path,
    gains: dict[str, float],
    pairs: int = 10,
    asked: int | None = None,
    metrics: Sequence[Metric] = METRICS,
) -> ComparisonResult:
    """Arms that are better than the first by ``gains`` pp in every pair, give or take a thousandth."""
    base = [80.0 + i / 3 for i in range(pairs)]
    hosts = {
        name: [
            host(
                value + nearly(gain, i),
                i,
                277 + 10 * nearly(gain, i),
                0.5 - nearly(gain, i) / 100,
            )
            for i, value in enumerate(base)
        ]
        for name, gain in gains.items()
    }
    arms = tuple(Arm(name, "random", TrainingConfig()) for name in gains)
    reference = next(iter(gains))
    return ComparisonResult(
        arms,
        reference,
        asked or pairs,
        hosts,
        analyse(hosts, reference, metrics),
        folder,
    )


def printed(found: ComparisonResult, plots: bool = False) -> str:
    """Returns the printed report; plots, which take most of its time, are drawn only with ``plots``."""
    text = io.StringIO()
    drawn = (
        nullcontext()
        if plots
        else mock.patch("esper.compare.table.save_plots", return_value=[])
    )
    with drawn:
        write_report(found, Console(file=text, width=80))
    return text.getvalue()
