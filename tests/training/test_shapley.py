"""Paired differences, and Shapley values against brute force over all orders, and their sum."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.core.stage import SeedStage as S
from esper.training.counterfactual import ALL_OFF, CounterfactualHelper
from esper.training.shapley import Coalition, coalitions, exact, paired
from tests.training.test_counterfactual import sites


def test_the_error_of_one_target_per_sample_is_that_of_a_mean() -> None:
    d = np.random.default_rng(0).integers(-1, 2, 200).astype(np.float64)
    found = paired(d, np.ones(200))
    assert found.difference == pytest.approx(100 * d.mean())
    assert found.error == pytest.approx(100 * d.std(ddof=1) / np.sqrt(200))


def test_samples_with_more_targets_weigh_more() -> None:
    """Ratio 2 / 10; residuals 1 - 1.6 and 1 - 0.4, so the error is sqrt(2 / 1 · (0.36 + 0.36)) / 10."""
    found = paired(np.array([1.0, 1.0]), np.array([8.0, 2.0]))
    assert found.difference == pytest.approx(20)
    assert found.error == pytest.approx(12)


Floats = NDArray[np.float64]
NAMES = ("a", "b", "c", "d")


def results(
    count: int, n: int = 60, tokens: bool = False
) -> tuple[dict[Coalition, Floats], Floats]:
    """Random results of all coalitions of ``count`` slots."""
    rng = np.random.default_rng(count)
    counts = rng.integers(1, 9, n).astype(float) if tokens else np.ones(n)
    return {
        c: rng.binomial(counts.astype(int), rng.uniform(0.1, 0.9)).astype(float)
        for c in coalitions(NAMES[:count])
    }, counts


def brute_force(
    names: tuple[str, ...], correct: dict[Coalition, Floats], counts: Floats
) -> dict[str, float]:
    """The definition: the mean gain of a slot over all orders."""
    gains: dict[str, list[float]] = {name: [] for name in names}
    for order in permutations(names):
        for place, slot in enumerate(order):
            before = frozenset(order[:place])
            gains[slot].append(
                100
                * float(
                    (correct[before | {slot}] - correct[before]).sum() / counts.sum()
                )
            )
    return {name: float(np.mean(values)) for name, values in gains.items()}


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_exact_values_are_those_of_all_orders(count: int, tokens: bool) -> None:
    correct, counts = results(count, tokens=tokens)
    names = NAMES[:count]
    found = exact(names, correct, counts)
    wanted = brute_force(names, correct, counts)
    assert {name: value.difference for name, value in found.items()} == pytest.approx(
        wanted
    )
    whole = 100 * float(
        (correct[frozenset(names)] - correct[frozenset()]).sum() / counts.sum()
    )
    assert sum(value.difference for value in found.values()) == pytest.approx(whole)


def test_a_slot_that_changes_nothing_is_worth_nothing_and_twins_are_worth_the_same() -> (
    None
):
    correct, counts = results(2)
    idle = {c | {"c"}: value for c, value in correct.items()} | correct
    found = exact(("a", "b", "c"), idle, counts)
    assert (found["c"].difference, found["c"].error) == (0, 0)
    twins = {c: np.full(60, float(len(c))) for c in coalitions(("a", "b"))}
    both = exact(("a", "b"), twins, counts)
    assert both["a"] == both["b"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_helper_has_the_full_table_of_up_to_four_blended_seeds(count: int) -> None:
    helper = CounterfactualHelper()
    plan = helper.plan(sites(*[(S.HOLDING, 1.0)] * count), costly=True)
    names = tuple(helper.on)
    rng = np.random.default_rng(5)
    helper.record(rng.integers(0, 2, (len(plan), 50)), np.zeros(len(plan)), np.ones(50))
    by_coalition = {
        frozenset(
            name for name, alpha in zip(names, configuration, strict=True) if alpha
        ): helper.correct[row]
        for row, configuration in enumerate(plan)
    }
    assert len(by_coalition) == 2**count
    wanted = brute_force(names, by_coalition, np.ones(50))
    assert {
        name: value.difference for name, value in helper.shapley().items()
    } == pytest.approx(wanted)
    whole = helper.difference(helper.all_on, ALL_OFF).difference
    assert sum(
        value.difference for value in helper.shapley().values()
    ) == pytest.approx(whole)
