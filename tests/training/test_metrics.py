"""Sums of an epoch: passes of each host, statistics of gradients, and values that are not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.data.objective import make_objective
from esper.ops.grad_stats import grad_stats
from esper.training.metrics import (
    GradientSummary,
    SeedGradientCollector,
    count_not_finite,
    finite_buffers,
    make_metrics,
)

CPU = torch.device("cpu")


def test_each_host_adds_to_its_own_rows() -> None:
    first, second = make_metrics(2, CPU, configurations=2, samples=4)
    stats = torch.arange(1.0, 6.0, dtype=torch.float64)
    first.add_training(stats)
    first.add_training(stats)
    assert first.training.tolist() == [2, 4, 6, 8, 10]
    assert second.training.tolist() == [0] * 5
    first.zero_training()
    assert first.accumulators.block.abs().sum() == 0


def test_batches_of_a_configuration_are_summed_and_samples_keep_their_places() -> None:
    _, metrics = make_metrics(2, CPU, configurations=3, samples=4)
    y = torch.tensor([0, 1, 2, 0])
    logits = 5 * torch.nn.functional.one_hot(torch.tensor([0, 1, 0, 0]), 3).float()
    objective = make_objective("cross_entropy", None, 3, y)
    for sample in (0, 2):
        part = slice(sample, sample + 2)
        objective.measure_into(
            logits[part], y[part], metrics.accumulators, metrics.place, 2, sample
        )
    assert metrics.correct(2)[1].tolist() == [1, 1, 0, 1]
    loss, right, count, *_ = metrics.stats(2)[1].tolist()
    assert loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, y, reduction="sum"))
    )
    assert (right, count) == (3, 4)
    assert metrics.stats(3)[[0, 2]].abs().sum() == 0


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


class Masked(nn.Module):
    """A norm, and a mask that is infinite from the start."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))


def test_only_buffers_that_were_finite_are_watched() -> None:
    network = Masked()
    watched = finite_buffers(network)
    # The number of batches is an integer, which is finite always.
    assert watched == {"norm.running_mean", "norm.running_var"}
    assert float(count_not_finite(network, watched, network.parameters())) == 0.0


def test_every_bad_value_of_parameters_and_buffers_is_counted() -> None:
    network = Masked()
    watched = finite_buffers(network)
    with torch.no_grad():
        network.norm.weight[:2] = math.nan
        network.norm.bias[0] = math.inf
    network.norm.running_mean[1] = -math.inf  # type: ignore[index]
    counted = count_not_finite(network, watched, network.parameters())
    assert counted.dtype == torch.float64
    assert float(counted) == 4.0
    assert float(count_not_finite(network, (), [network.norm.bias])) == 1.0
