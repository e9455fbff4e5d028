"""Paired statistics against brute force, against simulation, and by their symmetries."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.compare.statistics import (
    MIN_PAIRS,
    SMALLEST_P,
    ConfidenceInterval,
    PairedComparison,
    bootstrap_interval,
    compare_pairs,
    holm_adjusted,
    sign_flip_test,
    t_test,
)

ACCURACIES = st.floats(min_value=-100, max_value=100)
PAIRS = st.lists(st.tuples(ACCURACIES, ACCURACIES), min_size=1, max_size=14)


def brute_force_p(values: list[float]) -> float:
    """Share of all 2^n sign assignments whose |sum| reaches the observed one."""
    observed = abs(math.fsum(values))
    sums = [
        abs(math.fsum(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    return sum(total >= observed - 1e-9 for total in sums) / len(sums)


# --- p values


@pytest.mark.parametrize("n", [3, 40, 2000])
def test_no_p_value_is_zero_however_large_the_difference(n: int) -> None:
    """Student's t and the normal approximation underflow; a permutation counts the one that was observed."""
    noise = np.random.default_rng(n).normal(0, 1e-6, n)
    compared = compare_pairs(1e6 + noise, -noise, resamples=100)
    smallest = [t_test(1e6 + noise), compared.p_value, compared.mann_whitney_p]
    assert all(0 < p <= 1 for p in smallest)
    assert min(smallest) >= SMALLEST_P


# --- sign-flip test


@pytest.mark.parametrize("n", [1, 2, 10])
def test_sign_flip_equals_brute_force(n: int) -> None:
    values = np.random.default_rng(n).normal(0.5, 1, n).tolist()
    assert sign_flip_test(values) == brute_force_p(values)


@pytest.mark.parametrize("seed", range(3))
def test_sign_flip_counts_ties_of_accuracies_that_rounding_hides(seed: int) -> None:
    """Accuracies on 360 images differ by multiples of 100 / 360, so sign assignments often have equal sums."""
    correct = np.random.default_rng(seed).integers(300, 320, (2, 9))
    a, b = 100 * correct / 360
    assert sign_flip_test(a - b) == brute_force_p((correct[0] - correct[1]).tolist())


def test_sign_flip_known_values() -> None:
    assert sign_flip_test([3.0]) == 1.0  # one pair: the mirror is as far out
    assert sign_flip_test([1.0] * 10) == 2 / 2**10  # only all + and all -
    assert sign_flip_test([0.1] * 10) == 2 / 2**10  # the same where sums round
    assert sign_flip_test([0.0] * 10) == 1.0
    assert (
        sign_flip_test([0.0] * 30) == 1.0
    )  # the same by sampling: (1 + all) / (1 + all)
    assert (
        sign_flip_test([1.0] * 40, resamples=99) == 1 / 100
    )  # none of 99 draws reaches it, and p is never zero


def test_sampled_sign_flips_agree_with_enumeration() -> None:
    values = np.random.default_rng(5).normal(0.4, 1, 17)  # one more than is enumerated
    bits = (np.arange(2**17)[:, None] >> np.arange(17)) & 1
    exact = float((np.abs((1 - 2 * bits) @ values) >= abs(values.sum()) - 1e-9).mean())
    assert 0.02 < exact < 0.5  # a p that a sample of 20,000 can resolve
    sampled = sign_flip_test(values, resamples=20_000)
    assert sampled == pytest.approx(
        exact, abs=4 * math.sqrt(exact * (1 - exact) / 20_000)
    )


# --- interval of the mean


def test_interval_matches_the_enumerated_bootstrap() -> None:
    values = [0.0, 1.0, 2.5, 7.0]
    interval = bootstrap_interval(values, level=0.5, resamples=40_000)
    means = np.array(
        [np.mean(draw) for draw in itertools.product(values, repeat=4)]
    )  # all 256 resamples
    # level 0.5, n = 4: the t quantile at 0.25 with 3 degrees of freedom is -0.7649; times sqrt(4 / 3) it is -0.8832,
    # and the normal distribution has 0.1886 below that.
    tail, tolerance = 0.1886, 0.01
    assert (means < interval.low - 1e-9).mean() <= tail + tolerance
    assert (means <= interval.low + 1e-9).mean() >= tail - tolerance
    assert (means > interval.high + 1e-9).mean() <= tail + tolerance
    assert (means >= interval.high - 1e-9).mean() >= tail - tolerance


@pytest.mark.parametrize(("n", "level"), [(10, 0.95), (30, 0.8)])
def test_interval_coverage_is_near_nominal(n: int, level: float) -> None:
    rng = np.random.default_rng(n)
    trials = 500
    covered = 0
    for k in range(trials):
        covered += not bootstrap_interval(
            rng.normal(1.5, 3, n), level=level, resamples=600, seed=k
        ).excludes(1.5)
    # Four standard errors below nominal at level 0.95 are 3.9 pp: the plain percentiles' 90 % at n = 10 would fail.
    assert covered / trials == pytest.approx(
        level, abs=4 * math.sqrt(level * (1 - level) / trials)
    )


def test_interval_of_one_pair_is_everything() -> None:
    assert bootstrap_interval([2.0]) == ConfidenceInterval(-math.inf, math.inf)
    assert not bootstrap_interval([2.0]).excludes(0.0)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7])
def test_interval_of_equal_differences_is_that_point(value: float) -> None:
    assert bootstrap_interval([value] * 12) == ConfidenceInterval(value, value)


def test_resampling_is_by_seed() -> None:
    values = np.random.default_rng(2).normal(0, 1, 25)
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)
    assert sign_flip_test(values, seed=3) == sign_flip_test(values, seed=3)
    assert sign_flip_test(values, seed=3) != sign_flip_test(values, seed=4)


# --- the comparison


def test_comparison_numbers() -> None:
    comparison = compare_pairs(
        [3.0, 5.0, 4.0, 4.0], [1.0, 5.0, 5.0, 2.0], name_a="grown", name_b="alone"
    )
    # differences 2, 0, -1, 2: mean 0.75, squares around it 1.5625 + 0.5625 + 3.0625 + 1.5625 = 6.75, / 3 = 2.25
    assert (comparison.name_a, comparison.name_b, comparison.pairs) == (
        "grown",
        "alone",
        4,
    )
    assert (comparison.mean_a, comparison.mean_b, comparison.difference) == (
        4.0,
        3.25,
        0.75,
    )
    assert comparison.difference_std == pytest.approx(1.5)
    assert comparison.effect_size == pytest.approx(0.5)
    assert (comparison.wins, comparison.ties, comparison.losses) == (2, 1, 1)
    assert comparison.p_value == brute_force_p([2.0, 0.0, -1.0, 2.0])
    assert comparison.interval == bootstrap_interval([2.0, 0.0, -1.0, 2.0])
    assert 0 < comparison.mann_whitney_p <= 1


@pytest.mark.parametrize("train_seeds", [None, 11])
def test_equal_differences_have_no_spread_no_effect_size_and_no_p(
    train_seeds: int | None,
) -> None:
    """Also if they are equal but for rounding, which is that of the values."""
    large = [100.0 + i / 7 for i in range(11)]
    for a in ([0.1] * 11, [value + 0.1 for value in large]):
        b = [0.0] * 11 if a[0] == 0.1 else large
        found = compare_pairs(a, b, train_seeds=train_seeds)
        assert found.difference_std == 0.0
        assert math.isnan(found.effect_size)
        assert math.isnan(found.p_value)
        assert found.winner() is None
        assert found.verdict().startswith("no verdict: the same in all 11 ")


def test_arms_that_never_differ_have_a_p_of_one() -> None:
    found = compare_pairs([0.1] * 11, [0.1] * 11)
    assert (found.difference_std, found.p_value) == (0.0, 1.0)
    assert math.isnan(found.effect_size)
    assert found.verdict() == "no evidence of a difference"


@pytest.mark.finding("M14")
def test_no_winner_with_fewer_than_ten_pairs() -> None:
    high = [90.0 + i / 10 for i in range(MIN_PAIRS)]
    huge = compare_pairs(high[1:], [10.0] * (MIN_PAIRS - 1))
    assert huge.p_value < 0.05
    assert huge.interval.excludes(0.0)
    assert huge.winner() is None
    assert huge.verdict() == "inconclusive: under 10 pairs"
    assert compare_pairs(high, [10.0] * MIN_PAIRS).winner() == "a"


@pytest.mark.finding("M14")
@pytest.mark.parametrize(("shift", "winner"), [(5.0, "grown"), (-5.0, "alone")])
def test_a_clear_difference_has_a_winner(shift: float, winner: str) -> None:
    rng = np.random.default_rng(0)
    alone = rng.normal(80, 4, 12)
    comparison = compare_pairs(
        alone + shift + rng.normal(0, 1, 12), alone, name_a="grown", name_b="alone"
    )
    assert comparison.winner() == winner
    # From the winner's side: a positive gain, its interval in order.
    assert comparison.verdict().startswith(f"{winner} is better by ")
    low, high = (abs(edge) for edge in comparison.interval)
    assert (
        f"(95% interval {min(low, high):.2f} to {max(low, high):.2f}, p = "
        in comparison.verdict()
    )
    assert comparison.verdict().endswith("12 pairs)")


@pytest.mark.finding("M14")
def test_a_winner_needs_p_and_interval_and_pairs() -> None:
    def made(
        p: float, interval: ConfidenceInterval, pairs: int = 20
    ) -> PairedComparison:
        return PairedComparison(
            *("a", "b", pairs, 1.0, 0.0, 1.0, 1.0, 1.0, 0.95, interval, p),
            mann_whitney_u=0.0,
            mann_whitney_p=0.0,
            wins=1,
            ties=0,
            losses=0,
        )

    clear, unclear = ConfidenceInterval(0.5, 1.5), ConfidenceInterval(-0.5, 2.5)
    assert made(0.01, clear).winner() == "a"
    assert made(0.05, clear).winner() is None
    assert (
        made(0.01, clear).winner(p_value=0.06) is None
    )  # Holm's p replaces the comparison's own
    assert made(0.01, clear).verdict(p_value=0.06) == "no evidence of a difference"
    assert "p = 0.03" in made(0.01, clear).verdict(p_value=0.03)
    assert "p < 0.0001" in made(0.01, clear).verdict(p_value=0.0)
    assert made(0.2, clear).verdict() == "no evidence of a difference"
    assert made(0.01, unclear).verdict() == "no evidence of a difference"
    assert made(0.01, clear, pairs=9).winner() is None


@pytest.mark.trap(28)
def test_the_larger_average_is_no_winner_by_itself() -> None:
    rng = np.random.default_rng(28)
    trials = 200
    named = 0
    for k in range(trials):
        a, b = rng.normal(
            80, 3, (2, 12)
        )  # two equal arms: one average is always the larger
        named += compare_pairs(a, b, resamples=200, seed=k).winner() is not None
    assert named / trials <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials)


@settings(deadline=None)
@given(PAIRS)
def test_swapping_the_arms_mirrors_the_comparison(
    pairs: list[tuple[float, float]],
) -> None:
    a, b = [list(arm) for arm in zip(*pairs, strict=True)]
    one = compare_pairs(a, b, name_a="x", name_b="y", resamples=200)
    other = compare_pairs(b, a, name_a="y", name_b="x", resamples=200)
    assert one.difference == -other.difference
    assert one.p_value == pytest.approx(other.p_value, rel=0, abs=0, nan_ok=True)
    assert (one.wins, one.ties, one.losses) == (other.losses, other.ties, other.wins)
    assert one.wins + one.ties + one.losses == len(pairs)
    assert one.winner() == other.winner()


# --- Holm


def test_holm_known_values() -> None:
    # sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04, which must not fall: the last is 0.06 too
    assert holm_adjusted([0.04, 0.01, 0.03, 0.02]) == pytest.approx(
        [0.06, 0.04, 0.06, 0.06]
    )
    assert holm_adjusted([0.03]) == [0.03]
    assert holm_adjusted([]) == []
    assert holm_adjusted([0.9, 0.8]) == [1.0, 1.0]
    withheld, other = holm_adjusted([math.nan, 0.01])
    assert math.isnan(withheld)
    assert other == 0.02


# --- refused input


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="grown has 3 values, alone has 2"):
        compare_pairs([1.0, 2.0, 3.0], [1.0, 2.0], name_a="grown", name_b="alone")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_with_their_index(bad: float) -> None:
    with pytest.raises(ValueError, match=r"b\[2\] is -?(nan|inf)"):
        compare_pairs([1.0, 2.0, 3.0], [1.0, 2.0, bad])


def test_input_that_is_empty_or_of_two_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        compare_pairs([], [])
    with pytest.raises(ValueError, match="one dimension"):
        sign_flip_test(np.zeros((3, 2)))
