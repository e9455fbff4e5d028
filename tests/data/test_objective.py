"""Losses and scores by name, and objectives made of a task's fields."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.config import ConfigError
from esper.data.objective import (
    PAD,
    ClassObjective,
    SampleObjective,
    class_accuracy,
    class_losses,
    make_objective,
)
from esper.ops.accumulators import ACCUMULATOR_FIELDS, Accumulators

GENERATOR = torch.Generator().manual_seed(0)
TARGETS = torch.randn(6, 2, generator=GENERATOR)
OUTPUTS = torch.randn(6, 2, generator=GENERATOR)


def sampled(
    loss: object, score: object = None, classes: int | None = None, y: Tensor = TARGETS
) -> SampleObjective:
    made = make_objective(loss, score, classes, y)  # type: ignore[arg-type]
    assert isinstance(made, SampleObjective)
    return made


def test_mean_squared_error_scores_the_variance_explained() -> None:
    losses, scores = sampled("mse").of_samples(OUTPUTS, TARGETS)
    torch.testing.assert_close(losses, ((OUTPUTS - TARGETS) ** 2).mean(1))
    residual = ((OUTPUTS - TARGETS) ** 2).sum(0)
    total = ((TARGETS - TARGETS.mean(0)) ** 2).sum(0)
    assert float(scores.mean()) == pytest.approx(
        float((1 - residual / total).mean()), rel=1e-5
    )
    assert float(sampled("mse").score(TARGETS, TARGETS).mean()) == 1.0


def test_other_shapes_are_not_broadcast() -> None:
    with pytest.raises(
        ValueError,
        match=r"outputs of shape \(6, 2\) for targets \(6,\); expected the same",
    ):
        sampled("mse", y=TARGETS[:, 0]).of_samples(OUTPUTS, TARGETS[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_binary_cross_entropy_scores_the_labels_that_are_right(
    dtype: torch.dtype,
) -> None:
    y = (TARGETS > 0).to(dtype)
    losses, scores = sampled("bce", y=y).of_samples(OUTPUTS, y)
    wanted = F.binary_cross_entropy_with_logits(
        OUTPUTS, y.float(), reduction="none"
    ).mean(1)
    torch.testing.assert_close(losses, wanted)
    assert torch.equal(scores, ((OUTPUTS > 0) == (TARGETS > 0)).float().mean(1))


def test_classes_of_any_loss_are_scored_by_the_largest_logit() -> None:
    logits, y = (
        torch.randn(5, 4, 3, generator=GENERATOR),
        torch.randint(0, 3, (5, 4), generator=GENERATOR),
    )
    y[2, 1:] = PAD
    wanted = [
        F.cross_entropy(each[t != PAD], t[t != PAD])
        for each, t in zip(logits, y, strict=True)
    ]
    torch.testing.assert_close(class_losses(logits, y), torch.stack(wanted))
    right = [
        (each.argmax(1) == t)[t != PAD].float().mean()
        for each, t in zip(logits, y, strict=True)
    ]
    torch.testing.assert_close(class_accuracy(logits, y), torch.stack(right))


def test_sums_and_scores_of_samples_are_those_of_the_fused_pass() -> None:
    logits, y = (
        torch.randn(7, 3, generator=GENERATOR),
        torch.randint(0, 3, (7,), generator=GENERATOR),
    )
    rows = []
    for objective in (
        ClassObjective(language=False),
        SampleObjective(class_losses, class_accuracy),
    ):
        sums = Accumulators(2, 3, 9, objective.dtype)
        objective.measure_into(logits[:4], y[:4], sums, 1, 2, 0)
        objective.measure_into(logits[4:], y[4:], sums, 1, 2, 4)
        loss, stats = objective.measure(logits, y)
        rows.append((sums.block[1, 2], sums.correct[1, 2].float(), loss, stats))
        assert not sums.block[0].any()
    for fused, own in zip(*rows, strict=True):
        torch.testing.assert_close(fused, own, rtol=1e-5, atol=1e-6)


def test_a_value_that_is_not_finite_is_counted() -> None:
    outputs = OUTPUTS.clone()
    outputs[3, 1] = math.nan
    _, sums = sampled("mse").measure(outputs, TARGETS)
    assert sums[ACCUMULATOR_FIELDS.index("not_finite")] == 1


def test_functions_see_float32_outside_autocast() -> None:
    seen = []

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        seen.append((outputs.dtype, torch.is_autocast_enabled("cpu")))
        return (outputs - y).abs()

    with torch.autocast("cpu", torch.bfloat16):
        sampled(loss, "r2").of_samples(OUTPUTS.bfloat16(), TARGETS)
    assert seen == [(torch.float32, False)]


@pytest.mark.parametrize(
    ("loss", "score", "classes", "words"),
    [
        (
            "mae",
            None,
            None,
            "unknown loss 'mae'; known: cross_entropy, mse, bce, or a function",
        ),
        ("mse", "f1", None, "unknown score 'f1'; known: accuracy, r2, or a function"),
        ("cross_entropy", None, None, "needs classes"),
        (lambda o, y: (o - y).abs(), None, None, "a custom loss needs a score"),
    ],
)
def test_an_impossible_loss_or_score_is_refused(
    loss: object, score: object, classes: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        sampled(loss, score, classes)


def test_a_target_that_never_varies_has_no_r2() -> None:
    with pytest.raises(ConfigError, match="variance of the validation targets"):
        make_objective("mse", None, None, torch.ones(4, 1))
