"""Analysis of a comparison: every metric of every arm, and each arm against the reference on the same pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from esper.compare.runner import HostResult
from esper.compare.statistics import (
    Better,
    Floats,
    PairedComparison,
    Summary,
    arm_of_copies,
    compare_pairs,
    holm_adjusted,
    summarise,
)
from esper.telemetry.score import ACCURACY, ScoreUnit
from esper.telemetry.text import labelled, p_value, with_unit


@dataclass(frozen=True)
class Metric:
    """A number measured for each host."""

    name: str
    title: str
    unit: str
    better: Better
    of: Callable[[HostResult], float]
    decimals: int = 2
    judged: bool = True
    """Whether arms are compared in it. They are not in ratios that say how large a host is, and not how good."""

    def values(self, hosts: Sequence[HostResult]) -> Floats:
        """Returns the values of ``hosts`` [n], in the order of the pairs."""
        return np.array([self.of(host) for host in hosts], dtype=np.float64)

    def common(self, arms: Mapping[str, Sequence[HostResult]]) -> float | None:
        """Returns the value that all hosts of all ``arms`` have; None if they differ."""
        values: set[float] = set()
        for hosts in arms.values():
            values.update(map(self.of, hosts))
        first, *others = values
        return None if others else first

    @property
    def label(self) -> str:
        """Title and unit."""
        return labelled(self.title, self.unit)


def _added(host: HostResult) -> float:
    return host.parameters - host.host_parameters


def _per_parameter(host: HostResult) -> float:
    return 1e3 * host.accuracy / host.parameters


def _per_compute(host: HostResult) -> float:
    # None are counted of a network whose operations are all unknown.
    if not host.flops:
        return math.nan
    return 1e9 * host.accuracy / host.flops


def metrics_of(score: ScoreUnit) -> tuple[Metric, ...]:
    """Returns the metrics of a task with this score. The first one, the test score, is the subject of a comparison."""
    title = f"Test {score.name}"
    decimals = 2 + score.decimals
    return (
        Metric(
            "test_accuracy",
            title,
            score.unit,
            "higher",
            lambda host: score.of(host.accuracy),
            decimals,
        ),
        Metric("validation_loss", "Final validation loss", "", "lower", lambda host: host.loss, decimals=4),
        Metric("parameters_added", "Parameters added to the task's host", "", "neither", _added, decimals=0),
        Metric(
            "accuracy_per_parameter",
            f"{title} per 1,000 parameters",
            score.gap,
            "higher",
            lambda host: score.of(_per_parameter(host)),
            decimals,
            judged=False,
        ),
        Metric("compute", "Compute", "GFLOP", "neither", lambda host: host.flops / 1e9, decimals=3),
        Metric(
            "accuracy_per_compute",
            f"{title} per GFLOP",
            score.gap,
            "higher",
            lambda host: score.of(_per_compute(host)),
            decimals,
            judged=False,
        ),
        Metric("epochs", "Epochs trained", "", "neither", lambda host: host.epochs, decimals=1),
        Metric("rollbacks", "Rollbacks", "", "lower", lambda host: host.rollbacks),
        Metric("seeds_kept", "Seeds kept", "", "neither", lambda host: host.fossils),
    )


METRICS = metrics_of(ACCURACY)
TEST_ACCURACY = METRICS[0]


@dataclass(frozen=True)
class ArmComparison:
    """An arm against another in one metric; ``adjusted_p`` is corrected for all comparisons made together (Holm)."""

    pair: PairedComparison
    adjusted_p: float
    metric: Metric = TEST_ACCURACY

    @property
    def conclusive(self) -> bool:
        """Whether there is evidence of a difference."""
        return self.pair.winner(self.adjusted_p) is not None

    @property
    def verdict(self) -> str:
        """The verdict, as a sentence."""
        return self.pair.verdict(self.adjusted_p, self.metric.better, self.metric.decimals)

    @property
    def word(self) -> str:
        """The verdict on the first arm, for a table: better, worse, more, less, no evidence, no verdict (copies of
        one host, or pairs that all differ by the same number), or inconclusive (too few)."""
        if self.pair.few:
            return "inconclusive"
        if self.pair.constant:
            return "no verdict"
        if not self.conclusive:
            return "no evidence"
        above = self.pair.difference > 0
        if self.metric.better == "neither":
            return "more" if above else "less"
        # The better direction is up or down here.
        higher_is_better = self.metric.better == "higher"
        return "better" if above == higher_is_better else "worse"

    def line(self, score: ScoreUnit) -> str:
        """Returns the difference in ``score`` with its 95 % interval and the verdict on the first arm, as text.

        Scores of ``pair`` are in percentage points.
        """
        pair = self.pair
        decimals = 2 + score.decimals
        difference = with_unit(f"{score.of(pair.difference):+z6.{decimals}f}", score.gap)
        interval = "no interval"
        bounded = math.isfinite(pair.interval.high)
        if bounded:
            low = score.of(pair.interval.low)
            high = score.of(pair.interval.high)
            interval = f"{low:+z.{decimals}f} to {high:+z.{decimals}f}"
        verdict = self.word
        if verdict == "inconclusive":
            verdict += f", {pair.few}"
        elif verdict == "no verdict":
            verdict += f", {pair.constant}"
        elif verdict == "no evidence":
            verdict += " of a difference"
            if bounded and not low <= 0 <= high:  # it would be alone
                verdict += f" among all comparisons, p {p_value(self.adjusted_p, '= ')}"
        return f"{difference}, {interval}: {verdict}"


def corrected(pairs: Sequence[PairedComparison], metric: Metric = TEST_ACCURACY) -> list[ArmComparison]:
    """Returns the comparisons with p values corrected for their number (Holm)."""
    adjusted = holm_adjusted([pair.p_value for pair in pairs])
    return [ArmComparison(pair, p, metric) for pair, p in zip(pairs, adjusted, strict=True)]


@dataclass(frozen=True)
class MetricResult:
    """Results for one metric: a summary of each arm, and each other arm against the reference."""

    metric: Metric
    arms: Mapping[str, Summary]
    comparisons: Mapping[str, ArmComparison]
    missing: str | None = None
    """The reason that the metric has no results; ``arms`` and ``comparisons`` are then empty."""

    def plain(self) -> dict[str, Any]:
        """Returns all numbers, ready for JSON."""
        return {
            "metric": self.metric.name,
            "title": self.metric.title,
            "unit": self.metric.unit,
            "better": self.metric.better,
            "missing": self.missing,
            "arms": {name: asdict(summary) for name, summary in self.arms.items()},
            "comparisons": list(map(self._plain, self.comparisons.values())),
        }

    def _plain(self, comparison: ArmComparison) -> dict[str, Any]:
        pair = comparison.pair
        return {
            **asdict(pair),
            "iqm_difference": self.arms[pair.name_a].iqm - self.arms[pair.name_b].iqm,
            "adjusted_p": comparison.adjusted_p,
            "word": comparison.word,
            "verdict": comparison.verdict,
        }


def analyse(
    hosts: Mapping[str, Sequence[HostResult]],
    reference: str,
    metrics: Sequence[Metric] = METRICS,
    train_seeds: int | None = None,
    alike: bool = False,
) -> list[MetricResult]:
    """Analyses the hosts of each arm, given in the order of their pairs; one result for each of ``metrics``.

    ``train_seeds``: number of training seeds, if arms learn; the hosts of each follow one another. ``alike``:
    whether hosts do not differ from pair to pair, as simulated ones; those of an arm with equal scores are copies.
    """
    copies: dict[str, str | None] = {}
    if alike and train_seeds is None:
        scores = {name: TEST_ACCURACY.values(of_arm) for name, of_arm in hosts.items()}
        for name, of_arm in scores.items():
            copies[name] = arm_of_copies({reference: scores[reference], name: of_arm})
    return [_analyse(metric, hosts, reference, train_seeds, copies) for metric in metrics]


def _analyse(
    metric: Metric,
    hosts: Mapping[str, Sequence[HostResult]],
    reference: str,
    train_seeds: int | None,
    copies: Mapping[str, str | None],
) -> MetricResult:
    values = {name: metric.values(of_arm) for name, of_arm in hosts.items()}
    missing = _missing(values)
    if missing is not None:
        return MetricResult(metric, {}, {}, missing)
    # All comparisons of a metric are corrected together.
    base = values[reference]
    pairs = []
    for name, of_arm in values.items():
        if metric.judged and name != reference:
            pair = compare_pairs(
                of_arm,
                base,
                name_a=name,
                name_b=reference,
                train_seeds=train_seeds,
                copies=copies.get(name),
            )
            pairs.append(pair)
    return MetricResult(
        metric,
        arms={name: summarise(of_arm, train_seeds) for name, of_arm in values.items()},
        comparisons={comparison.pair.name_a: comparison for comparison in corrected(pairs, metric)},
    )


def _missing(values: Mapping[str, Floats]) -> str | None:
    """Returns the reason that these values of each arm cannot be compared; None if they can."""
    bad = {name: int((~np.isfinite(of_arm)).sum()) for name, of_arm in values.items()}
    if sum(bad.values()) == sum(map(len, values.values())):
        return "not measured for these hosts"
    if any(bad.values()):
        # Leaving out these pairs would hide the failures of an arm.
        counts = ", ".join(f"{name} {count} of {len(values[name])}" for name, count in bad.items() if count)
        return f"no verdict: some values are not finite ({counts})"
    return None
