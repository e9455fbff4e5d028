"""Metrics measured for every host, and which direction is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from esper.evaluation.arm_runner import HostResult
from esper.stats.samples import Floats

Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Metric:
    """A number measured for each host."""

    name: str
    title: str
    unit: str
    better: Better
    """Which direction is better; neither for a cost: a higher one may be worth it."""
    of: Callable[[HostResult], float]
    decimals: int = 2

    def values(self, hosts: Sequence[HostResult]) -> Floats:
        """Returns the values of ``hosts`` [n], in the order of the pairs."""
        return np.array([self.of(host) for host in hosts], dtype=np.float64)

    @property
    def heading(self) -> str:
        """Title, unit and direction."""
        way = {"higher": "higher is better", "lower": "lower is better", "neither": "neither direction is better"}
        return f"{self.title}{f', {self.unit}' if self.unit else ''} ({way[self.better]})"


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


METRICS = (
    Metric("test_accuracy", "Test accuracy", "%", "higher", lambda host: host.accuracy),
    Metric("validation_loss", "Final validation loss", "", "lower", lambda host: host.loss, decimals=4),
    Metric(
        "parameters_added",
        "Parameters added to the task's host",
        "",
        "neither",
        lambda host: host.parameters - host.host_parameters,
        decimals=0,
    ),
    Metric(
        "accuracy_per_parameter",
        "Test accuracy per 1,000 parameters",
        "pp",
        "higher",
        lambda host: _ratio(1e3 * host.accuracy, host.parameters),
    ),
    Metric("compute", "Compute", "GFLOP", "neither", lambda host: host.flops / 1e9, decimals=3),
    Metric(
        "accuracy_per_compute",
        "Test accuracy per GFLOP",
        "pp",
        "higher",
        lambda host: _ratio(1e9 * host.accuracy, host.flops),
    ),
    Metric("epochs", "Epochs trained", "", "neither", lambda host: host.epochs, decimals=1),
    Metric("rollbacks", "Rollbacks", "", "lower", lambda host: host.rollbacks),
    Metric("seeds_kept", "Seeds kept", "", "neither", lambda host: host.fossils),
)
"""The first one is the subject of a comparison."""
