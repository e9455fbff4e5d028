"""Statistical analysis: every metric of every arm, and each arm against the reference on the same pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from esper.evaluation.arm_runner import HostResult
from esper.evaluation.metrics import METRICS, Metric
from esper.stats.paired import MIN_PAIRS, PairedComparison, compare_pairs, holm_adjusted
from esper.stats.samples import Floats
from esper.stats.summary import Summary, summarise

ALPHA = 0.05
SAME = "no evidence of a difference"


@dataclass(frozen=True)
class Versus:
    """An arm against the reference in one metric; ``adjusted_p`` is corrected for all arms of that metric (Holm)."""

    metric: Metric
    pair: PairedComparison
    adjusted_p: float

    @property
    def conclusive(self) -> bool:
        """Whether there is evidence of a difference, in either direction."""
        return self.pair.winner(ALPHA, self.adjusted_p) is not None

    @property
    def word(self) -> str:
        """The verdict as one word for a table: better, worse, more, less, no evidence, or inconclusive."""
        if self.pair.pairs < MIN_PAIRS:
            return "inconclusive"
        if not self.conclusive:
            return "no evidence"
        above = self.pair.difference > 0
        if self.metric.better == "neither":
            return "more" if above else "less"
        return "better" if above == (self.metric.better == "higher") else "worse"

    @property
    def verdict(self) -> str:
        """The verdict as a sentence."""
        pair, word = self.pair, self.word
        if word == "inconclusive":
            return f"inconclusive: fewer than {MIN_PAIRS} pairs"
        if word == "no evidence":
            return SAME
        decimals = self.metric.decimals
        low, high = sorted(abs(limit) for limit in pair.interval)
        return (
            f"{pair.name_a}: {abs(pair.difference):.{decimals}f} {word} than {pair.name_b} "
            f"({pair.level:.0%} interval {low:.{decimals}f} to {high:.{decimals}f}, p = {self.adjusted_p:.2g}, "
            f"{pair.pairs} pairs)"
        )


@dataclass(frozen=True)
class Findings:
    """Results for one metric: a summary of each arm, and each arm against the reference."""

    metric: Metric
    arms: Mapping[str, Summary]
    versus: Mapping[str, Versus]
    missing: str | None = None
    """Why the metric has no results; ``arms`` and ``versus`` are then empty."""


def analyse(hosts: Mapping[str, Sequence[HostResult]], reference: str) -> list[Findings]:
    """Analyses the hosts of each arm, given in the order of their pairs. The results are in the order of METRICS."""
    return [
        _findings(metric, {name: metric.values(own) for name, own in hosts.items()}, reference) for metric in METRICS
    ]


def _findings(metric: Metric, values: Mapping[str, Floats], reference: str) -> Findings:
    bad = {name: int((~np.isfinite(own)).sum()) for name, own in values.items()}
    if all(bad[name] == len(own) for name, own in values.items()):
        return Findings(metric, {}, {}, missing="not measured for these hosts")
    if any(bad.values()):
        # Leaving out these pairs would hide the failures of an arm.
        told = ", ".join(f"{name} {count} of {len(values[name])}" for name, count in bad.items() if count)
        return Findings(metric, {}, {}, missing=f"no verdict: some values are not finite ({told})")
    pairs = {
        name: compare_pairs(own, values[reference], name_a=name, name_b=reference)
        for name, own in values.items()
        if name != reference
    }
    adjusted = holm_adjusted([pair.p_value for pair in pairs.values()])
    versus = {name: Versus(metric, pair, p) for (name, pair), p in zip(pairs.items(), adjusted, strict=True)}
    return Findings(metric, {name: summarise(own) for name, own in values.items()}, versus)


def smallest_p(pairs: int, comparisons: int) -> float:
    """Smallest corrected p value that ``pairs`` pairs can reach: 2 / 2^pairs times ``comparisons``, at most 1."""
    return float(min(1.0, comparisons * 2.0 ** (1 - pairs)))


def plain(findings: Findings) -> dict[str, Any]:
    """Returns all numbers, ready for JSON."""
    metric = findings.metric
    return {
        "metric": metric.name,
        "title": metric.title,
        "unit": metric.unit,
        "better": metric.better,
        "missing": findings.missing,
        "arms": {name: asdict(summary) for name, summary in findings.arms.items()},
        "comparisons": [
            {
                **asdict(found.pair),
                "iqm_difference": findings.arms[name].iqm - findings.arms[found.pair.name_b].iqm,
                "adjusted_p": found.adjusted_p,
                "word": found.word,
                "verdict": found.verdict,
            }
            for name, found in findings.versus.items()
        ],
    }
