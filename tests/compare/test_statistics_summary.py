"""Interquartile mean, bootstrap intervals and Mann-Whitney U: known values, coverage, and rates of false verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from esper.compare.analysis import ArmComparison, corrected
from esper.compare.statistics import (
    ConfidenceInterval,
    bootstrap_interval,
    compare_pairs,
    holm_adjusted,
    iqm,
    summarise,
)


def test_iqm_known_values() -> None:
    assert iqm([1.0, 2.0, 3.0, 100.0]) == 2.5  # one left out on each side
    assert iqm([1.0, 2.0, 3.0]) == 2.0  # too few to leave any out
    assert iqm([*range(10)]) == 4.5
    assert iqm([-1000.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 1000.0]) == 5.0
    assert iqm([[1.0, 2.0, 3.0, 100.0], [0.0, 0.0, 4.0, 4.0]]).tolist() == [2.5, 2.0]


def test_the_bootstrap_agrees_with_scipys() -> None:
    values = np.random.default_rng(1).normal(80, 3, 12)
    # The level at which scipy's plain percentiles are the expanded ones.
    tail = stats.norm.cdf(stats.t.ppf(0.025, 11) * math.sqrt(12 / 11))
    plain = stats.bootstrap(
        (values,),
        iqm,
        method="percentile",
        confidence_level=1 - 2 * tail,
        n_resamples=20_000,
        rng=3,
    ).confidence_interval
    found = bootstrap_interval(values, iqm, resamples=20_000)
    assert found == pytest.approx((plain.low, plain.high), abs=0.15)


def test_a_summary_of_one_value_has_no_spread() -> None:
    found = summarise([3.0])
    assert (found.mean, found.iqm, found.mean_interval) == (
        3.0,
        3.0,
        ConfidenceInterval(-math.inf, math.inf),
    )
    assert math.isnan(found.std)


def test_mann_whitney_known_value() -> None:
    """Three against three, all above: 2 of the 20 ways to choose three of six are as extreme."""
    found = compare_pairs([4.0, 5.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.mann_whitney_u, found.mann_whitney_p) == (9.0, pytest.approx(2 / 20))


@pytest.mark.finding("M14")
def test_under_the_null_a_difference_is_rarely_found() -> None:
    """Four arms that differ from the reference by noise alone, ten pairs, 100 comparisons of this kind: any verdict at
    all is wrong, and Holm keeps the share of comparisons with one at 5 %."""
    rng, wrong = np.random.default_rng(5), 0
    for number in range(100):
        hosts = rng.normal(85, 3, 10)  # shared by all arms of a pair
        reference = hosts + rng.normal(0, 1, 10)
        arms = [hosts + rng.normal(0, 1, 10) for _ in range(4)]
        pairs = [
            compare_pairs(arm, reference, resamples=200, seed=number) for arm in arms
        ]
        wrong += any(found.conclusive for found in corrected(pairs))
    assert wrong / 100 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100)


@pytest.mark.finding("M14")
def test_a_real_difference_is_found() -> None:
    """The test above would also pass if no difference were ever found."""
    rng, found = np.random.default_rng(6), 0
    for number in range(50):
        hosts = rng.normal(85, 3, 10)
        pair = compare_pairs(
            hosts + 2 + rng.normal(0, 1, 10),
            hosts + rng.normal(0, 1, 10),
            resamples=200,
            seed=number,
        )
        found += (
            ArmComparison(pair, holm_adjusted([pair.p_value] * 4)[0]).word == "better"
        )
    assert found >= 40
