"""Analysis of a comparison: corrected p values, verdicts, and training seeds as pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from esper.compare.analysis import METRICS, TEST_ACCURACY, analyse, corrected
from esper.compare.runner import HostResult
from esper.compare.statistics import compare_pairs, holm_adjusted
from esper.telemetry.score import ACCURACY
from tests.compare.arm_results import against, arm
from tests.compare.outcomes import host, nearly
from tests.compare.trained_seeds import trained

BASE = [80.0 + i for i in range(10)]


@pytest.mark.finding("M14")
def test_p_values_are_corrected_for_all_comparisons() -> None:
    """Ten pairs that all differ by the same sign: exact p = 2 / 2^10. Holm over two comparisons: times 2, then 1."""
    better = arm("better", *(value + nearly(1, i) for i, value in enumerate(BASE)))
    same = arm("same", *BASE)
    found = {c.pair.name_a: c for c in against(arm("none", *BASE), better, same)}
    assert list(found) == ["better", "same"]
    assert found["better"].pair.p_value == 2 / 1024
    assert found["better"].adjusted_p == 2 * 2 / 1024
    assert found["same"].adjusted_p == 1.0
    assert found["better"].verdict.startswith("better is better by 1.00")
    assert found["same"].verdict == "no evidence of a difference"


def test_a_difference_lost_to_the_correction_is_not_a_win() -> None:
    """p = 0.0273 alone; with five comparisons it is 0.14, and the verdict follows the corrected one."""
    weak = [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0, -9.0]
    arms = [
        arm(f"arm{i}", *(b + w for b, w in zip(BASE, weak, strict=True)))
        for i in range(5)
    ]
    alone = compare_pairs(arms[0].accuracy, np.array(BASE))
    found = against(arm("none", *BASE), *arms)
    assert [c.adjusted_p for c in found] == holm_adjusted([alone.p_value] * 5)
    assert found[0].adjusted_p == pytest.approx(min(1.0, 5 * alone.p_value))
    assert all(c.verdict == "no evidence of a difference" for c in found)


def test_pairs_that_differ_by_one_number_have_no_p_and_no_verdict() -> None:
    """However many there are; the comparison beside them is corrected for both."""
    none = arm("none", *[64.63] * 10)
    noise = np.random.default_rng(0).normal(70, 1, 10)
    shifted, noisy = against(none, arm("shifted", *[77.1] * 10), arm("noisy", *noise))
    assert math.isnan(shifted.adjusted_p)
    assert noisy.adjusted_p == 2 * 2 / 1024
    assert (shifted.conclusive, shifted.word) == (False, "no verdict")
    same = "the same in all 10 pairs, so there is no spread to judge it by"
    assert shifted.verdict == f"no verdict: {same}"
    assert shifted.line(ACCURACY).endswith(f"no verdict, {same}")


@pytest.mark.parametrize("constant", ["none", "arm", "both"])
def test_simulated_hosts_with_equal_results_are_copies_and_no_sample(
    constant: str,
) -> None:
    """Whatever the other arm has: ten copies know no more than one."""
    noise = np.random.default_rng(0).normal(70, 1, 10)
    same = [64.63] * 10
    values = {"none": same if constant != "arm" else noise}
    values["mine"] = [67.15] * 10 if constant != "none" else noise
    hosts = {
        name: [host(accuracy, number) for number, accuracy in enumerate(of_arm)]
        for name, of_arm in values.items()
    }
    found, loss, *_ = analyse(hosts, "none", METRICS, alike=True)
    assert loss.comparisons["mine"].verdict.endswith("which are no sample")
    comparison = found.comparisons["mine"]
    pair = comparison.pair
    copies = "mine" if constant == "arm" else "none"
    words = f"all 10 hosts of {copies} are copies of one host, which are no sample"
    assert (comparison.word, comparison.verdict) == (
        "no verdict",
        f"no verdict: {words}",
    )
    assert comparison.line(ACCURACY).endswith(f"no interval: no verdict, {words}")
    numbers = (comparison.adjusted_p, pair.effect_size, pair.mann_whitney_p)
    assert all(map(math.isnan, (*numbers, pair.mann_whitney_u)))
    assert math.isinf(pair.interval.high)


def test_hosts_that_vary_are_compared_also_if_they_are_simulated() -> None:
    """And so are real hosts whose results are equal, as in a task that all of them solve."""
    noise = np.random.default_rng(0).normal(70, 1, (2, 10))
    hosts = {
        name: [host(accuracy, 0) for accuracy in of_arm]
        for name, of_arm in zip(("none", "mine"), noise, strict=True)
    }
    (found,) = analyse(hosts, "none", (TEST_ACCURACY,), alike=True)
    assert found.comparisons["mine"].pair.copies is None
    hosts["mine"] = [host(100.0, 0) for _ in range(10)]
    (found,) = analyse(hosts, "none", (TEST_ACCURACY,))
    assert found.comparisons["mine"].word == "better"
    # Training seeds are a sample of agents, on whatever hosts they play.
    (found,) = analyse(hosts, "none", (TEST_ACCURACY,), 5, alike=True)
    assert found.comparisons["mine"].pair.copies is None


def test_accuracy_by_size_has_means_and_no_verdict() -> None:
    """Every grown small host has less of it."""
    for metric in METRICS:
        hosts = {"a": [host(80.0, 1), host(81.0, 2)], "b": [host(82.0, 1, 300.0)] * 2}
        (found,) = analyse(hosts, "a", [metric])
        by_size = metric.name.startswith("accuracy_per")
        assert metric.judged != by_size
        assert bool(found.comparisons) != by_size
        assert len(found.arms) == 2


@pytest.mark.finding("M14")
def test_nine_pairs_name_no_winner() -> None:
    (found,) = against(
        arm("none", *BASE[:9]), arm("better", *(v + 5 for v in BASE[:9]))
    )
    assert found.pair.wins == 9
    assert found.verdict == "inconclusive: under 10 pairs"


def test_a_worse_arm_is_reported_as_worse() -> None:
    worse = (v - nearly(2, i) for i, v in enumerate(BASE))
    (found,) = against(arm("none", *BASE), arm("worse", *worse))
    assert found.verdict.startswith("none is better by 2.00")


@pytest.mark.parametrize(("seeds", "word"), [(4, "inconclusive"), (5, "better")])
def test_fewer_than_five_training_seeds_are_inconclusive(seeds: int, word: str) -> None:
    better = trained(seeds, 16, 10.0, 0.1, 0.1)
    (found,) = corrected(
        [compare_pairs(better, np.zeros_like(better), name_a="new", train_seeds=seeds)]
    )
    assert found.word == word
    if word == "inconclusive":
        assert found.verdict == "inconclusive: under 5 training seeds"
        assert found.pair.winner() is None
    else:
        assert found.verdict.startswith("new is better by ")
        assert found.verdict.endswith("5 training seeds)")


def test_an_analysis_by_seed_has_the_seeds_as_pairs() -> None:
    hosts = {
        name: [
            HostResult(80.0 + gain * n, 0.5, 300.0, 277.0, 1e9, 30.0, 0.0, 1.0)
            for n in range(10)
        ]
        for name, gain in (("none", 0.0), ("ppo", 0.5))
    }
    (found,) = analyse(hosts, "none", (TEST_ACCURACY,), 5)
    pair = found.comparisons["ppo"].pair
    assert (pair.pairs, pair.trained, pair.difference) == (5, True, pytest.approx(2.25))
    (by_host,) = analyse(hosts, "none", (TEST_ACCURACY,))
    assert by_host.comparisons["ppo"].pair.pairs == 10
