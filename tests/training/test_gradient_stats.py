"""Gradient statistics of an epoch by owner."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.ops.grad_stats import FIELDS, grad_stats
from esper.training.gradient_stats import GradientSummary, SeedGradientCollector

CPU = torch.device("cpu")


def collector(*batches: tuple[list[list[Tensor]], Any]) -> dict[str, GradientSummary]:
    made = SeedGradientCollector(3, CPU)
    made.restart(("host", "r0c0"))
    for gradients, overflowed in batches:
        made.add(
            grad_stats(gradients),
            None if overflowed is None else torch.tensor(overflowed),
        )
    return made.summaries(made.packed())


LARGE, SMALL, LOST = (
    torch.tensor([3.0, 4.0]),
    torch.tensor([0.6, 0.8]),
    torch.tensor([1e-9, 0.0]),
)


def test_summaries_are_means_over_batches() -> None:
    found = collector(
        ([[LARGE], [SMALL, LOST]], None), ([[SMALL], [SMALL, SMALL]], None)
    )
    assert found["host"].norm == pytest.approx(3.0)
    assert found["host"].elements == 2
    assert (found["r0c0"].vanishing, found["r0c0"].exploding) == (0.25, 0.0)
    assert found["r0c0"].health == pytest.approx((0.75 + 1) / 2)


def test_an_overflowed_batch_is_left_out_of_the_means_of_its_group() -> None:
    broken = torch.tensor([math.inf, math.nan])
    found = collector(
        ([[SMALL], [broken]], [False, True]), ([[SMALL], [LARGE]], [False, False])
    )
    assert (found["r0c0"].norm, found["r0c0"].health, found["r0c0"].not_finite) == (
        5.0,
        1.0,
        0.0,
    )
    counted = collector(([[SMALL], [broken]], None))
    assert counted["r0c0"].not_finite == 2


def test_an_epoch_without_batches_has_no_summaries() -> None:
    assert collector() == {}


def test_an_epoch_starts_from_zero_in_the_same_memory() -> None:
    made = SeedGradientCollector(2, CPU)
    made.restart(("host", "r0c0"))
    place = made.total.data_ptr()
    made.add(grad_stats([[LARGE], [SMALL]]))
    made.restart(("host",))
    assert made.total.data_ptr() == place
    assert made.packed().tolist() == [0.0] * (len(FIELDS) + 1)


def summary(norm: float, elements: float, **values: float) -> GradientSummary:
    given = {
        "health": 1.0,
        "vanishing": 0.0,
        "exploding": 0.0,
        "not_finite": 0.0,
        **values,
    }
    return GradientSummary(norm=norm, elements=elements, **given)


def test_the_ratio_of_gradients_is_that_of_roots_of_mean_squares() -> None:
    assert summary(6.0, 9).ratio_to(summary(2.0, 4)) == pytest.approx(2.0)
    assert summary(1.0, 1).ratio_to(summary(0.0, 4)) == pytest.approx(1e8)
    assert summary(0.0, 0).ratio_to(summary(2.0, 4)) == 0


def test_health_has_the_weights_that_are_given_and_is_never_negative() -> None:
    found = summary(1.0, 1.0, health=0.65, vanishing=0.5, exploding=0.125)
    assert found.health_by(0.5, 0.8) == pytest.approx(0.65)
    assert found.health_by(0.1, 0.8) == pytest.approx(0.85)
    assert found.health_by(2.0, 2.0) == 0
