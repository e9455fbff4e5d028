"""Unpaired comparison of two samples: how often a value of one exceeds a value of the other.

These statistics say how far two arms lie apart, not whether they differ. That question belongs to the paired test of
``esper.stats.paired``, which has more power on the same hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from scipy import stats

from esper.stats.samples import Floats, finite_values


def mann_whitney(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> tuple[float, float]:
    """Returns U of ``a`` and its two-sided p (Mann and Whitney 1947), by ``scipy.stats.mannwhitneyu``.

    U = #{(i, j): a_i > b_j} + #{(i, j): a_i = b_j} / 2, from 0 to n_a n_b. The p value is exact if one sample has at
    most 8 values and there are no ties, otherwise from the normal approximation with corrections for ties and
    continuity.

    Raises:
        ValueError: no values, or a value that is not finite.
    """
    found = stats.mannwhitneyu(finite_values(a, "a"), finite_values(b, "b"), alternative="two-sided")
    return float(found.statistic), float(found.pvalue)


def cliffs_delta(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """delta = P(a > b) - P(a < b) = 2 U / (n_a n_b) - 1 over all pairs of values (Cliff 1993), from -1 to 1.

    1: every value of ``a`` exceeds every value of ``b``; 0: neither tends to be larger.

    Raises:
        ValueError: no values, or a value that is not finite.
    """
    u, _ = mann_whitney(a, b)
    return 2 * u / (len(a) * len(b)) - 1
