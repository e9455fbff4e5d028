"""Statistics of arms that were trained several times: the unit of evidence is the training seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from esper.compare.statistics import (
    bootstrap_interval,
    compare_pairs,
    iqm,
    summarise,
    t_test,
)
from tests.compare.trained_seeds import trained


def test_p_is_that_of_the_paired_t_test_over_the_means_of_seeds() -> None:
    a, b = trained(6, 4, 1.0, 1.0, 2.0), trained(6, 4, 0.0, 1.0, 2.0, seed=1)
    found = compare_pairs(a, b, train_seeds=6)
    means = a.reshape(6, 4).mean(axis=1), b.reshape(6, 4).mean(axis=1)
    assert found.p_value == pytest.approx(stats.ttest_rel(*means).pvalue)
    assert found.pairs == 6
    assert found.difference == pytest.approx((a - b).mean())
    assert found.difference_std == pytest.approx(np.std(means[0] - means[1], ddof=1))
    assert found.wins + found.ties + found.losses == 6


def test_the_t_test_of_values_without_spread() -> None:
    assert t_test([0.0, 0.0, 0.0]) == 1.0
    assert math.isnan(t_test([2.0, 2.0, 2.0]))
    assert t_test([2.0]) == 1.0


def test_the_interval_is_that_of_resampled_seeds_and_hosts_within_them() -> None:
    """The reference is the variance of such a resample in closed form, widened by the t quantile."""
    seeds, hosts = 40, 6
    values = trained(seeds, hosts, 1.0, 2.0, 3.0)
    grouped = values.reshape(seeds, hosts)
    variance = (grouped.mean(axis=1).var() + grouped.var(axis=1).mean() / hosts) / seeds
    half = stats.t.ppf(0.975, seeds - 1) * math.sqrt(variance * seeds / (seeds - 1))
    low, high = bootstrap_interval(values, resamples=10_000, train_seeds=seeds)
    assert low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_the_interval_is_wider_than_that_of_hosts_if_trainings_differ() -> None:
    values = trained(5, 16, 1.0, 2.0, 1.0)
    by_seed, by_host = (
        bootstrap_interval(values, train_seeds=5),
        bootstrap_interval(values),
    )
    assert by_seed.high - by_seed.low > 2 * (by_host.high - by_host.low)
    assert summarise(values, 5).mean_interval == by_seed
    assert summarise(values).mean_interval == by_host


def test_five_seeds_cover_the_gain_of_training_and_their_hosts_alone_do_not() -> None:
    trials, by_seed, by_host = 100, 0, 0
    for number in range(trials):
        values = trained(5, 8, 1.0, 1.0, 1.0, seed=number)
        by_seed += not bootstrap_interval(
            values, resamples=1000, train_seeds=5
        ).excludes(1.0)
        by_host += not bootstrap_interval(values, resamples=500).excludes(1.0)
    assert by_seed >= 0.92 * trials
    assert by_host <= 0.75 * trials


def test_a_summary_is_that_of_the_means_of_seeds() -> None:
    values = trained(5, 3, 1.0, 1.0, 1.0)
    means = values.reshape(5, 3).mean(axis=1)
    found = summarise(values, 5)
    assert (found.mean, found.std) == (
        pytest.approx(values.mean()),
        pytest.approx(means.std(ddof=1)),
    )
    assert found.iqm == pytest.approx(float(iqm(means)))
    assert found.iqm_interval.low < found.iqm < found.iqm_interval.high


def test_many_hosts_of_one_training_have_no_interval() -> None:
    low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0], train_seeds=1)
    assert (low, high) == (-math.inf, math.inf)
    assert compare_pairs([1.0, 2.0], [0.0, 0.0], train_seeds=1).p_value == 1.0
