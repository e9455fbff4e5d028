"""Samples of numbers: validation, spread, and bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A confidence interval, in the unit of its data."""

    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether ``value`` lies strictly outside."""
        return value < self.low or value > self.high


def finite_values(values: Sequence[float] | Floats, name: str) -> Floats:
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


def check_resamples(resamples: int) -> None:
    """Raises ValueError if ``resamples`` is less than 1."""
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")


def sample_std(values: Floats) -> float:
    """Standard deviation over n - 1: NaN for one value, exactly 0 for equal ones, whose mean may be rounded."""
    if len(values) == 1:
        return math.nan
    return 0.0 if (values == values[0]).all() else float(values.std(ddof=1))


def percentile_interval(values: Floats, resampled: Floats, level: float) -> Interval:
    """Returns the bootstrap interval of a statistic of ``values`` [n], from its values ``resampled`` [R].

    The two percentiles are moved outwards, so that the interval of the mean of normal data is as wide as the t interval
    (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", the expanded percentile interval): the tail is
    that of the normal distribution at the t quantile with n - 1 degrees of freedom, times sqrt(n / (n - 1)), since
    resamples vary by the standard deviation over n. One value carries no information about the spread and gives (-inf,
    inf); equal values give that single point, since no resample can differ.

    Raises:
        ValueError: a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    n = len(values)
    if n == 1:
        return Interval(-math.inf, math.inf)
    if (values == values[0]).all():
        return Interval(float(values[0]), float(values[0]))
    tail = stats.norm.cdf(stats.t.ppf((1 - level) / 2, n - 1) * math.sqrt(n / (n - 1)))
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(float(low), float(high))
