"""Sums of an epoch: passes of each host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.data.objective import make_objective
from esper.training.metrics import EpochMetrics, make_metrics

CPU = torch.device("cpu")


def measured(
    metrics: EpochMetrics, configuration: int, logits: Tensor, y: Tensor, sample: int
) -> None:
    metrics.add_validation(
        make_objective("cross_entropy", None, 3, y), configuration, logits, y, sample
    )


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
    for sample in (0, 2):
        measured(
            metrics, 1, logits[sample : sample + 2], y[sample : sample + 2], sample
        )
    assert metrics.correct(2)[1].tolist() == [1, 1, 0, 1]
    loss, right, count, *_ = metrics.stats(2)[1].tolist()
    assert loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, y, reduction="sum"))
    )
    assert (right, count) == (3, 4)
    assert metrics.stats(3)[[0, 2]].abs().sum() == 0
    metrics.zero_validation(1)
    assert metrics.stats(3)[1, 1] == 3, "only the first configuration is zeroed"
    metrics.zero_validation(2)
    assert metrics.stats(3).abs().sum() == 0
