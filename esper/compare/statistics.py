"""Statistics of a comparison: summaries of one arm, and paired tests of whether two arms differ.

Element i of two arms must share everything but what is compared: the seed, the data, the host. Arms run on different
seeds cannot be compared, whatever their averages. A winner is named only on evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy  # loads scipy.stats, which takes two thirds of a second, where it is first used

Floats = npt.NDArray[np.float64]
Values = Sequence[float] | Floats
Statistic = Callable[..., Floats]
Better = Literal["higher", "lower", "neither"]
"""Direction in which values are better; neither for a cost, which may be worth paying."""

ALPHA = 0.05
"""Significance level of every verdict."""
LEVEL = 0.95
"""Confidence level of every interval."""
MIN_PAIRS = 10
"""Min pairs needed to name a winner."""
MIN_SEEDS = 5
"""Min training seeds needed to name a winner, if they are the unit of evidence."""
ROUNDING = 1e-12
"""Values whose largest distance is this part of them, or less, are equal but for rounding."""
SMALLEST_P = 2.0**-52
"""Smallest p value of a test that computes one in float64, which rounds to it: p is never 0."""

MAX_EXACT_PAIRS = 16
"""Max pairs for which the sign-flip test enumerates every assignment (at most 2^15: the last sign is fixed)."""


class ConfidenceInterval(NamedTuple):
    """A confidence interval, in the unit of its data."""

    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether ``value`` lies strictly outside."""
        return value < self.low or value > self.high


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Arms ``a`` and ``b`` measured on the same n pairs; every difference is a - b.

    ``difference_std`` is the sample standard deviation (n - 1), NaN for one pair; ``effect_size`` is ``difference /
    difference_std`` (Cohen's d_z), NaN without spread. ``p_value`` is the sign-flip test's. It is NaN if all pairs
    differ by the same number, which leaves no spread to judge it by, or if an arm consists of ``copies``.
    ``mann_whitney_u`` (of ``a``) and its two-sided p ignore the pairing; they are only displayed, and the verdict does
    not use them. Wins, ties and losses count the pairs in which ``a`` is higher, equal and lower.

    If arms learn (``trained``), a pair is a training seed, and its values are the means over the hosts of that seed.
    The p value is then that of the paired t test over seeds, because no assignment of signs to five of them can have a
    p below 0.06.
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
    interval: ConfidenceInterval
    p_value: float
    mann_whitney_u: float
    mann_whitney_p: float
    wins: int
    ties: int
    losses: int
    trained: bool = False
    copies: str | None = None
    """The arm whose hosts are copies of one host. Copies are no sample: there is no p, no effect size, no
    Mann-Whitney test, and the interval is unbounded."""

    @property
    def few(self) -> str | None:
        """The lack of evidence that forbids a verdict, such as ``under 10 pairs``; None if there is enough."""
        least = MIN_SEEDS if self.trained else MIN_PAIRS
        if self.pairs >= least:
            return None
        return f"under {least} {self._unit}"

    @property
    def constant(self) -> str | None:
        """The reason that a comparison has no p: an arm consists of copies, or all pairs differ by the same number.

        None if it has one."""
        if self.copies:
            return f"all {self.pairs} hosts of {self.copies} are copies of one host, which are no sample"
        if not math.isnan(self.p_value):
            return None
        return f"the same in all {self.pairs} {self._unit}, so there is no spread to judge it by"

    @property
    def _unit(self) -> str:
        return "training seeds" if self.trained else "pairs"

    def winner(self, p_value: float | None = None, better: Better = "higher") -> str | None:
        """Returns the name of the better arm (the higher one if neither direction is better), or None without evidence.

        Evidence requires ``MIN_PAIRS`` pairs (``MIN_SEEDS`` training seeds), p < ``ALPHA`` and an interval that
        excludes zero. ``p_value`` replaces the comparison's own p, if it is one of several, by its entry of
        :func:`holm_adjusted`.
        """
        if p_value is None:
            p_value = self.p_value
        significant = p_value < ALPHA and self.interval.excludes(0.0)
        if self.few or not significant:
            return None
        a_is_higher = self.difference > 0
        a_is_better = a_is_higher == (better != "lower")
        return self.name_a if a_is_better else self.name_b

    def verdict(self, p_value: float | None = None, better: Better = "higher", decimals: int = 2) -> str:
        """Returns the verdict as one sentence; arguments as in :meth:`winner`."""
        if self.few:
            return f"inconclusive: {self.few}"
        if self.constant:
            return f"no verdict: {self.constant}"
        if p_value is None:
            p_value = self.p_value
        winner = self.winner(p_value, better)
        if winner is None:
            return "no evidence of a difference"
        comparative = "higher" if better == "neither" else "better"
        low, high = sorted(map(abs, self.interval))
        p = f"= {p_value:.2g}"
        if p_value < 1e-4:
            p = "< 0.0001"
        return (
            f"{winner} is {comparative} by {abs(self.difference):.{decimals}f} "
            f"({self.level:.0%} interval {low:.{decimals}f} to {high:.{decimals}f}, p {p}, "
            f"{self.pairs} {self._unit})"
        )


def compare_pairs(
    a: Values,
    b: Values,
    *,
    name_a: str = "a",
    name_b: str = "b",
    resamples: int = 10_000,
    seed: int = 0,
    train_seeds: int | None = None,
    copies: str | None = None,
) -> PairedComparison:
    """Compares two arms pair by pair. Raises ValueError for unequal lengths, no pairs, or a value that is not finite.

    Args:
        a, b: results of the arms, shape [n] each; ``a[i]`` and ``b[i]`` are one pair.
        resamples: number of bootstrap resamples, and of sign assignments drawn if there are too many to enumerate.
        seed: seed of both resamplings; the same input and seed give the same result.
        train_seeds: number of training seeds, each with n / train_seeds consecutive hosts, if they are the unit of
            evidence; None: every host is.
        copies: the arm whose hosts are copies of one host, see :func:`arm_of_copies`.
    """
    left = _finite(a, name_a)
    right = _finite(b, name_b)
    if len(left) != len(right):
        raise ValueError(f"pairs need equal lengths: {name_a} has {len(left)} values, {name_b} has {len(right)}")
    # The bootstrap draws hosts as well as training seeds; everything else is about the means of seeds.
    interval = bootstrap_interval(left - right, resamples=resamples, seed=seed, train_seeds=train_seeds)
    left = seed_means(left, train_seeds)
    right = seed_means(right, train_seeds)
    differences = left - right
    difference = float(differences.mean())
    # Differences are rounded as their arms are, which may be far larger.
    largest = float(max(np.abs(left).max(), np.abs(right).max()))
    std = _sample_std(differences, largest)
    effect_size = difference / std if std else math.nan
    mann_whitney = scipy.stats.mannwhitneyu(left, right, alternative="two-sided")
    mann_whitney_u = float(mann_whitney.statistic)
    mann_whitney_p = max(SMALLEST_P, float(mann_whitney.pvalue))
    p_value = t_test(differences) if train_seeds else sign_flip_test(differences, resamples, seed)
    if std == 0.0 and abs(difference) > ROUNDING * largest:
        p_value = math.nan
    if copies:
        interval = ConfidenceInterval(-math.inf, math.inf)
        effect_size = p_value = mann_whitney_u = mann_whitney_p = math.nan
    return PairedComparison(
        name_a=name_a,
        name_b=name_b,
        pairs=len(differences),
        mean_a=float(left.mean()),
        mean_b=float(right.mean()),
        difference=difference,
        difference_std=std,
        effect_size=effect_size,
        level=LEVEL,
        interval=interval,
        p_value=p_value,
        mann_whitney_u=mann_whitney_u,
        mann_whitney_p=mann_whitney_p,
        wins=int((left > right).sum()),
        ties=int((left == right).sum()),
        losses=int((left < right).sum()),
        trained=train_seeds is not None,
        copies=copies,
    )


def arm_of_copies(arms: Mapping[str, Values]) -> str | None:
    """Returns the first arm of simulated hosts, which do not differ, whose scores are all equal; None without one."""
    for name, values in arms.items():
        if len(values) > 1 and np.ptp(values) == 0.0:
            return name
    return None


def seed_means(values: Floats, train_seeds: int | None) -> Floats:
    """Returns the mean of each training seed's consecutive hosts, [..., train_seeds]; ``values`` [..., n] if None."""
    if train_seeds is None:
        return values
    means: Floats = values.reshape(*values.shape[:-1], train_seeds, -1).mean(axis=-1)
    return means


def t_test(differences: Values) -> float:
    """Two-sided p value of the paired t test on differences [n]; 1 for one value or for zeros, NaN for equal others."""
    values = _finite(differences, "differences")
    n = len(values)
    if n == 1 or not values.any():
        return 1.0
    std = _sample_std(values)
    if not std:
        return math.nan
    t = abs(values.mean()) * math.sqrt(n) / std
    return max(SMALLEST_P, float(2 * scipy.stats.t.sf(t, n - 1)))


def sign_flip_test(differences: Values, resamples: int = 10_000, seed: int = 0) -> float:
    """Two-sided p value of the mean of paired differences, shape [n], under the hypothesis that signs are random.

    Exact for n <= ``MAX_EXACT_PAIRS``: the share of the 2^n sign assignments whose |mean| reaches the observed one, so
    never below 2^(1-n). For larger n, (1 + hits) / (1 + resamples) over random assignments (Phipson and Smyth 2010).

    ``scipy.stats.permutation_test`` is not used because its tolerance is relative to the observed mean: it misses ties
    if the differences nearly cancel, as those of accuracies on a small split do.
    """
    values = _finite(differences, "differences")
    n = len(values)
    exact = n <= MAX_EXACT_PAIRS
    if exact:
        # The last sign stays +: an assignment and its negation have the same |sum|, so half of them suffice.
        flips = (np.arange(2 ** (n - 1))[:, None] >> np.arange(n)) & 1
    else:
        flips = np.random.default_rng(seed).integers(0, 2, size=(resamples, n))
    # Equal sums added in another order differ in the last bits: the observed assignment must still match itself.
    tolerance = 1e-12 * np.abs(values).sum()
    sums = (1.0 - 2.0 * flips) @ values  # a flip of 1 is the sign -1
    hits = np.abs(sums) >= abs(values.sum()) - tolerance
    if exact:
        return float(hits.mean())
    return float((1 + hits.sum()) / (1 + resamples))


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): adjusted p values, in the given order, for all comparisons made together.

    A comparison without p, NaN, stays so, and the others are corrected for it, too.
    """
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")  # NaN comes last
    # The smallest is multiplied by n, the next one by n - 1, ...; none may be below the one before.
    factors = np.arange(len(values), 0, -1)
    stepped = np.minimum(1.0, factors * values[order])
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(stepped)
    return list(map(float, adjusted))


def iqm(values: npt.ArrayLike, axis: int = -1) -> Floats:
    """Interquartile mean along an axis: the mean without the floor(n / 4) smallest and the floor(n / 4) largest values.

    A single outlier does not move it, and it is statistically more efficient than the median (Agarwal et al. 2021,
    "Deep Reinforcement Learning at the Edge of the Statistical Precipice").
    """
    return np.asarray(scipy.stats.trim_mean(values, 0.25, axis=axis))


def bootstrap_interval(
    values: Values,
    statistic: Statistic = np.mean,
    level: float = LEVEL,
    resamples: int = 10_000,
    seed: int = 0,
    train_seeds: int | None = None,
) -> ConfidenceInterval:
    """Bootstrap interval of a statistic, a function with ``axis``, of values [n]; memory grows with n * resamples.

    Percentile bootstrap with its two percentiles moved outwards, so that the interval of the mean of normal data is as
    wide as the t interval (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", the expanded percentile
    interval): the tail is that of the normal distribution at the t quantile with n - 1 degrees of freedom, times
    sqrt(n / (n - 1)), since resamples vary by the standard deviation over n. For 10 values, the plain percentiles cover
    90 % instead of 95 %; so does BCa, which is also undefined if values are nearly equal.

    One value carries no information about the spread: the interval is (-inf, inf). If all values are equal, the
    interval is that single point, since no resample can differ. Raises ValueError as :func:`compare_pairs` does.

    With ``train_seeds``, values are those of that number of equal clusters, one after the other, and n is the
    number of clusters. A resample draws clusters, and then hosts within each (Davison and Hinkley 1997, section 3.8),
    so that the interval covers the spread of training. It errs on the wide side, because the spread of hosts is in the
    means of the clusters already.
    """
    array = _finite(values, "values")
    size = len(array)
    n = train_seeds or size
    if n == 1:
        return ConfidenceInterval(-math.inf, math.inf)
    if (array == array[0]).all():
        value = float(array[0])
        return ConfidenceInterval(value, value)

    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, n, size=(resamples, n))
    if train_seeds is not None:
        hosts = size // n
        within = generator.integers(0, hosts, size=(resamples, n, hosts))
        # The hosts of a seed lie one after the other.
        drawn = (drawn[:, :, None] * hosts + within).reshape(resamples, size)
    resampled = statistic(array[drawn], axis=-1)

    quantile = scipy.stats.t.ppf((1 - level) / 2, n - 1)
    tail = scipy.stats.norm.cdf(quantile * math.sqrt(n / (n - 1)))
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return ConfidenceInterval(float(low), float(high))


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm's values of one metric; ``std`` is over n - 1, NaN for one value. Intervals are at ``LEVEL``.

    If arms learn, ``std`` and ``iqm`` are those of the means of training seeds.
    """

    mean: float
    std: float
    iqm: float
    mean_interval: ConfidenceInterval
    iqm_interval: ConfidenceInterval


def summarise(values: Values, train_seeds: int | None = None) -> Summary:
    """Summarises ``values`` [n]. Raises ValueError without values, or for a value that is not finite.

    ``train_seeds``: as in :func:`compare_pairs`.
    """
    array = _finite(values, "values")
    means = seed_means(array, train_seeds)

    def iqm_of_seeds(hosts: Floats, axis: int) -> Floats:
        """Interquartile mean of the means of training seeds, which are along the last axis."""
        return iqm(seed_means(hosts, train_seeds), axis)

    return Summary(
        float(means.mean()),
        _sample_std(means),
        float(iqm(means)),
        bootstrap_interval(array, train_seeds=train_seeds),
        bootstrap_interval(array, iqm_of_seeds, train_seeds=train_seeds),
    )


def _finite(values: Values, name: str) -> Floats:
    """Returns ``values`` as float64 [n]. Raises ValueError if they are not one-dimensional, not finite, or empty."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.size == 0:
        raise ValueError(f"{name} is empty: there is nothing to compare")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}: all values must be finite")
    return array


def _sample_std(values: Floats, rounded_at: float = 0.0) -> float:
    """Standard deviation over n - 1: NaN for one value, exactly 0 for values that are equal but for rounding, which is
    that of the largest one or of a number as large as ``rounded_at``."""
    if len(values) == 1:
        return math.nan
    largest = max(float(np.abs(values).max()), rounded_at)
    if np.ptp(values) <= ROUNDING * largest:
        return 0.0
    return float(values.std(ddof=1))
