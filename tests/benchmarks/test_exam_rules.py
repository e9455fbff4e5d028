from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.exam_rules import (
    PlanTable,
    ceiling,
    cost_of,
    costs,
    halving,
    returns_of,
)
from esper.exam.context import Context
from tests.exam.test_context import TABLE


def contexts(count: int) -> list[Context]:
    prices = np.linspace(0.5, 8, count)
    return [
        Context("digits", width=2, samples=100, epochs=5, price=price)
        for price in prices
    ]


def test_the_first_plan_is_free_and_wider_ones_cost_more() -> None:
    paid = costs(contexts(3))
    assert (paid[:, 0] == 0).all()
    assert (np.diff(paid, axis=1) > 0).all()


def test_a_doubling_of_the_parameters_costs_the_price() -> None:
    grown = TABLE.parameters(4) / TABLE.parameters()
    assert cost_of(replace(TABLE, price=3.0), 4) == pytest.approx(3 * np.log2(grown))
    assert cost_of(TABLE, 1) == 0


def test_the_ceiling_is_judged_on_a_seed_that_did_not_choose() -> None:
    lucky = np.zeros((1, 3, 2))
    lucky[0, 1, 0] = 10.0  # one seed's luck
    assert ceiling(lucky)[0] == pytest.approx(0.0)
    sure = np.zeros((1, 3, 2))
    sure[0, 2] = 4.0
    assert ceiling(sure)[0] == pytest.approx(4.0)


def test_a_table_finds_the_price_above_which_growing_does_not_pay() -> None:
    few = contexts(40)
    accuracies = np.full((40, 5, 1), 50.0)
    accuracies[:, 1:] += 5.0
    returns = returns_of(few, accuracies)
    single = PlanTable.fit((), few, returns)
    table = PlanTable.fit(("price",), few, returns)
    assert set(single.choose(few)) == {0}
    assert table.choose(few)[0] == 1
    assert table.choose(few)[-1] == 0


def test_a_cell_of_few_contexts_takes_the_best_single_plan() -> None:
    few = contexts(4)
    accuracies = np.full((4, 5, 1), 50.0)
    accuracies[0, 1] = 90.0
    table = PlanTable.fit(("price",), few, returns_of(few, accuracies))
    assert table.plans == {}
    assert set(table.choose(few)) == {table.single}


def test_halving_takes_what_is_best_in_short_trainings_at_the_price() -> None:
    two = contexts(2)
    tried = np.array([[50.0, 60, 60, 60, 60], [50, 60, 60, 60, 60]])
    assert halving(two, tried).tolist() == [1, 0]
