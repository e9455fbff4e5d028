"""Paired statistics: is A better than B, and does the evidence support saying so?

Element i of both arms must share everything but what is compared: the seed, the data, the host. Arms run on different
seeds cannot be compared, whatever their averages. Higher values are better (accuracies in pp); a winner is named only
on evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from esper.stats.samples import Floats, Interval, check_resamples, finite_values, percentile_interval, sample_std
from esper.stats.unpaired import cliffs_delta, mann_whitney

MIN_PAIRS = 10
"""Min pairs needed to name a winner."""

EXACT_PAIRS = 16
"""Max pairs for which the sign-flip test enumerates every assignment (at most 2^15: the last sign is fixed)."""


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Arms ``a`` and ``b`` measured on the same n pairs; every difference is a - b.

    ``difference_std`` is the sample standard deviation (n - 1), ``effect_size`` is ``difference / difference_std``
    (Cohen's d_z); both are NaN for one pair. ``p_value`` is the sign-flip test's. ``mann_whitney_u``, its p and
    ``cliffs_delta`` ignore the pairing; they are only displayed, and the verdict does not use them. Wins, ties and
    losses are those of ``a``, by exact comparison.
    """

    name_a: str
    name_b: str
    pairs: int
    mean_a: float
    mean_b: float
    difference: float
    difference_std: float
    effect_size: float
    level: float
    interval: Interval
    p_value: float
    mann_whitney_u: float
    mann_whitney_p: float
    cliffs_delta: float
    wins: int
    ties: int
    losses: int

    def winner(self, alpha: float = 0.05, p_value: float | None = None) -> str | None:
        """Returns the name of the better arm, or None without evidence.

        Evidence requires ``MIN_PAIRS`` pairs, p < ``alpha`` and an interval that excludes zero. ``p_value`` replaces
        the comparison's own p if it is one of several: pass its entry of :func:`holm_adjusted`.
        """
        p = self.p_value if p_value is None else p_value
        if self.pairs < MIN_PAIRS or not p < alpha or not self.interval.excludes(0.0):
            return None
        return self.name_a if self.difference > 0 else self.name_b

    def verdict(self, alpha: float = 0.05, p_value: float | None = None) -> str:
        """Returns the verdict as one sentence; arguments as in :meth:`winner`."""
        if self.pairs < MIN_PAIRS:
            return f"inconclusive: fewer than {MIN_PAIRS} pairs"
        winner = self.winner(alpha, p_value)
        if winner is None:
            return "no evidence of a difference"
        sign = 1 if winner == self.name_a else -1
        low, high = sorted((sign * self.interval.low, sign * self.interval.high))
        p = self.p_value if p_value is None else p_value
        return (
            f"{winner} is better by {sign * self.difference:.2f} "
            f"({self.level:.0%} interval {low:.2f} to {high:.2f}, p = {p:.2g}, {self.pairs} pairs)"
        )


def compare_pairs(
    a: Sequence[float] | Floats,
    b: Sequence[float] | Floats,
    *,
    name_a: str = "a",
    name_b: str = "b",
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedComparison:
    """Compares two arms pair by pair.

    Args:
        a, b: results of the arms, shape [n] each, higher is better; ``a[i]`` and ``b[i]`` are one pair.
        level: confidence level of the interval of the mean difference, in (0, 1).
        resamples: number of bootstrap resamples, and of sign assignments drawn if there are too many pairs to
            enumerate.
        seed: seed of both resamplings; the same input and seed give the same result.

    Raises:
        ValueError: unequal lengths, no pairs, or a value that is not finite (for an arm that diverged, pass the result
            it actually reached, or leave out the pair on both sides).
    """
    left, right = finite_values(a, name_a), finite_values(b, name_b)
    if len(left) != len(right):
        raise ValueError(f"pairs need equal lengths: {name_a} has {len(left)} values, {name_b} has {len(right)}")
    differences = left - right
    std = sample_std(differences)
    mean = float(differences.mean())
    u, u_p = mann_whitney(left, right)
    return PairedComparison(
        name_a=name_a,
        name_b=name_b,
        pairs=len(differences),
        mean_a=float(left.mean()),
        mean_b=float(right.mean()),
        difference=mean,
        difference_std=std,
        effect_size=_effect_size(mean, std),
        level=level,
        interval=paired_bootstrap_interval(differences, level, resamples, seed),
        p_value=sign_flip_test(differences, resamples, seed),
        mann_whitney_u=u,
        mann_whitney_p=u_p,
        cliffs_delta=cliffs_delta(left, right),
        wins=int((left > right).sum()),
        ties=int((left == right).sum()),
        losses=int((left < right).sum()),
    )


def paired_bootstrap_interval(
    differences: Sequence[float] | Floats, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Bootstrap interval of the mean of paired differences, shape [n]; memory grows with n * resamples.

    Percentile bootstrap with its two percentiles moved outwards, so that for normal data the interval is as wide as the
    t interval (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", the expanded percentile interval). For
    10 pairs, the plain percentiles cover 90 % instead of 95 %; so does BCa, which is also undefined if differences are
    nearly equal.

    One pair carries no information about the spread: the interval is (-inf, inf). If all differences are equal, the
    interval is that single point, since no resample can differ; only the sign-flip test then guards against naming a
    winner on few pairs.

    Raises:
        ValueError: no values, a value that is not finite, a level outside (0, 1), or no resamples.
    """
    values = finite_values(differences, "differences")
    check_resamples(resamples)
    n = len(values)
    indices = np.random.default_rng(seed).integers(0, n, size=(resamples, n))
    return percentile_interval(values, values[indices].mean(axis=1), level)


def sign_flip_test(differences: Sequence[float] | Floats, resamples: int = 10_000, seed: int = 0) -> float:
    """Two-sided p value of the mean of paired differences, shape [n], under the hypothesis that signs are random.

    Exact for n <= ``EXACT_PAIRS``: the share of the 2^n sign assignments whose |mean| reaches the observed one, so
    never below 2^(1-n). For larger n, (1 + hits) / (1 + resamples) over random assignments (Phipson and Smyth 2010).

    Raises:
        ValueError: no values, a value that is not finite, or no resamples.
    """
    values = finite_values(differences, "differences")
    check_resamples(resamples)
    n = len(values)
    if n <= EXACT_PAIRS:
        # The last sign stays +: an assignment and its negation have the same |sum|, so half of them suffice.
        bits = (np.arange(2 ** (n - 1))[:, None] >> np.arange(n)) & 1
        return float(_reaches_observed(bits, values).mean())
    bits = np.random.default_rng(seed).integers(0, 2, size=(resamples, n))
    return float((1 + _reaches_observed(bits, values).sum()) / (1 + resamples))


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): adjusted p values, in the given order, for all comparisons made together.

    Raises:
        ValueError: a p value is not in [0, 1].
    """
    for index, p in enumerate(p_values):
        if not 0 <= p <= 1:
            raise ValueError(f"p_values[{index}] is {p}, not between 0 and 1")
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def _reaches_observed(bits: npt.NDArray[np.int64], values: Floats) -> npt.NDArray[np.bool_]:
    """Returns which rows of sign bits [m, n] give at least the observed |sum|, shape [m]."""
    # Equal sums added in another order differ in the last bits: the observed assignment must still match itself.
    tolerance = 1e-12 * np.abs(values).sum()
    return np.asarray(np.abs((1.0 - 2.0 * bits) @ values) >= abs(values.sum()) - tolerance)


def _effect_size(mean: float, std: float) -> float:
    """Returns mean / std. Without spread, it is 0 for a zero mean, otherwise infinite; NaN if std is NaN."""
    if std == 0:
        return math.copysign(math.inf, mean) if mean else 0.0
    return mean / std
