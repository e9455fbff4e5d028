"""Losses and scores that cannot be used are refused before a run starts, with advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import esper
from esper.data.host_checks import check_hosts
from tests.data.objective_tasks import Y, task


def accepted(made: esper.Task) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        check_hosts(made)


def scaled(value: float) -> Any:
    return lambda o, y: value * (o - y).abs().mean(1)


def rising(o: Tensor, y: Tensor) -> Tensor:
    return (o - y).abs().mean() - (o - y).abs().mean(1)


REFUSED = {
    "a mean": (
        lambda o, y: F.mse_loss(o, y),
        r"shape \(\) .*tensor of shape \[3\] or \[3, ...\]; .*reduction='none'",
    ),
    "not a tensor": (
        lambda o, y: 1.0,
        "returns float; it must return one value per sample",
    ),
    "integers": (
        lambda o, y: (o > y).long()[:, 0],
        r"returns torch.int64; expected floating-point",
    ),
    "an error": (
        lambda o, y: o @ y,
        r"the loss fails for outputs \(3, 1\) and targets torch.float32 \(3, 1\): Runtime",
    ),
    "other samples": (rising, "changes with the other samples of its batch"),
    "no gradient": (lambda o, y: (o - y).detach(), "the loss has no gradient"),
    "not finite": (
        lambda o, y: (o - y).abs() / 0,
        "the loss of an untrained host is not finite",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_is_not_one_value_per_sample_is_refused(case: str) -> None:
    loss, words = REFUSED[case]
    with pytest.raises(esper.ConfigError, match=words):
        accepted(task(loss))


def test_shapes_that_would_be_broadcast_are_refused() -> None:
    """[n, 1] minus [n] is [n, n]: a finite number for each sample, and none of them its loss."""
    with pytest.raises(
        esper.ConfigError, match=r"Are shapes broadcast, such as \(n, 1\) with \(n,\)\?"
    ):
        accepted(task(lambda o, y: (o - y) ** 2, Y[:, 0]))
    with pytest.raises(
        esper.ConfigError,
        match=r"outputs of shape \(3, 2\) for targets \(3, 1\); expected the same",
    ):
        accepted(task("mse", outputs=2))


def test_a_score_is_checked_as_a_loss_but_may_count() -> None:
    accepted(task(score=lambda o, y: (o > 0) == (y > 0)))
    with pytest.raises(esper.ConfigError, match=r"the score returns shape \(\)"):
        accepted(task(score=lambda o, y: -F.mse_loss(o, y)))


def test_a_score_in_another_unit_is_refused_until_points_say_so() -> None:
    with pytest.raises(
        esper.ConfigError, match="set points so that scores span about 100 of them"
    ):
        accepted(task(score=scaled(-1e4)))
    accepted(task(score=scaled(-1e4), points=0.01))
    with pytest.raises(esper.ConfigError, match="points is 0; it must be positive"):
        task(points=0)


def test_targets_of_any_shape_and_dtype_are_taken_with_a_loss_for_them() -> None:
    masks = torch.randint(0, 2, (96, 2, 3))

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            o.view(y.shape), y.float(), reduction="none"
        )

    accepted(task(loss, masks, 6, score=lambda o, y: (o.view(y.shape) > 0) == (y > 0)))
    accepted(task("bce", (Y > 0).byte(), score=None))
