"""Statistics of arms that were trained several times: the unit of evidence is the training seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from esper.evaluation.analysis import TEST_ACCURACY, analyse, corrected
from esper.evaluation.runner import HostResult
from esper.evaluation.statistics import Floats, bootstrap_interval, compare_pairs, iqm, summarise, t_test


def trained(seeds: int, hosts: int, gain: float, spread: float, noise: float, seed: int = 0) -> Floats:
    """Differences of ``hosts`` hosts for each of ``seeds`` trainings, whose own gains have a standard deviation."""
    rng = np.random.default_rng(seed)
    return (gain + rng.normal(0, spread, (seeds, 1)) + rng.normal(0, noise, (seeds, hosts))).ravel()


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
    assert t_test([2.0, 2.0, 2.0]) == 0.0
    assert t_test([2.0]) == 1.0


def test_the_interval_is_that_of_resampled_seeds_and_hosts_within_them() -> None:
    """Against the variance of such a resample, known in closed form, and the t quantile that widens it."""
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
    by_seed, by_host = bootstrap_interval(values, train_seeds=5), bootstrap_interval(values)
    assert by_seed.high - by_seed.low > 2 * (by_host.high - by_host.low)
    assert summarise(values, 5).mean_interval == by_seed
    assert summarise(values).mean_interval == by_host


def test_five_seeds_cover_the_gain_of_training_and_their_hosts_alone_do_not() -> None:
    trials, by_seed, by_host = 200, 0, 0
    for number in range(trials):
        values = trained(5, 8, 1.0, 1.0, 1.0, seed=number)
        by_seed += not bootstrap_interval(values, resamples=2000, train_seeds=5).excludes(1.0)
        by_host += not bootstrap_interval(values, resamples=500).excludes(1.0)
    assert by_seed >= 0.92 * trials
    assert by_host <= 0.75 * trials


def test_a_summary_is_that_of_the_means_of_seeds() -> None:
    values = trained(5, 3, 1.0, 1.0, 1.0)
    means = values.reshape(5, 3).mean(axis=1)
    found = summarise(values, 5)
    assert (found.mean, found.std) == (pytest.approx(values.mean()), pytest.approx(means.std(ddof=1)))
    assert found.iqm == pytest.approx(float(iqm(means)))
    assert found.iqm_interval.low < found.iqm < found.iqm_interval.high


@pytest.mark.parametrize(("seeds", "word"), [(4, "inconclusive"), (5, "better")])
def test_fewer_than_five_training_seeds_are_inconclusive(seeds: int, word: str) -> None:
    better = trained(seeds, 16, 10.0, 0.1, 0.1)
    (found,) = corrected([compare_pairs(better, np.zeros_like(better), name_a="new", train_seeds=seeds)])
    assert found.word == word
    if word == "inconclusive":
        assert found.verdict == "inconclusive: under 5 training seeds"
        assert found.pair.winner() is None
    else:
        assert found.verdict.startswith("new is better by ")
        assert found.verdict.endswith("5 training seeds)")


def test_many_hosts_of_one_training_have_no_interval() -> None:
    low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0], train_seeds=1)
    assert (low, high) == (-math.inf, math.inf)
    assert compare_pairs([1.0, 2.0], [0.0, 0.0], train_seeds=1).p_value == 1.0


def test_an_analysis_by_seed_has_the_seeds_as_pairs() -> None:
    hosts = {
        name: [HostResult(80.0 + gain * n, 0.5, 300.0, 277.0, 1e9, 30.0, 0.0, 1.0) for n in range(10)]
        for name, gain in (("none", 0.0), ("ppo", 0.5))
    }
    (found,) = analyse(hosts, "none", (TEST_ACCURACY,), 5)
    pair = found.comparisons["ppo"].pair
    assert (pair.pairs, pair.trained, pair.difference) == (5, True, pytest.approx(2.25))
    (by_host,) = analyse(hosts, "none", (TEST_ACCURACY,))
    assert by_host.comparisons["ppo"].pair.pairs == 10
