"""Both sides of the cases of operators compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.bench.case import BenchArgs, load_case
from esper.bench.operators import (
    MEAN,
    STD,
    ThreeModules,
    drawing,
    public_loss,
    public_statistics,
    torchvision_pipeline,
)
from esper.ops.cross_entropy import cross_entropy
from esper.ops.grad_stats import grad_stats
from esper.ops.norm_relu_pool import NormReluPool
from esper.ops.stage_batch import normalisation_table, stage_images

DTYPES = (torch.float32, torch.bfloat16)
draw = drawing(torch.device("cpu"))


def vectors(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [vector for group in groups for vector in group["params"]]


@pytest.mark.parametrize("case", ["sgd", "adamw"])
def test_both_sides_make_the_same_clipped_steps(case: str) -> None:
    (comparison,) = load_case(case).comparisons(BenchArgs(sizes=((3, 8),)))
    run: Any = comparison.run
    run_baseline: Any = comparison.run_baseline
    own = vectors(run.args[0])
    before = [vector.clone() for vector in own]
    run()
    run_baseline()  # once: torch's step leaves its gradients scaled
    assert len(own) == 12
    torch.testing.assert_close(own, vectors(run_baseline.args[0]))
    for then, now in zip(before, own, strict=True):
        assert not torch.equal(then, now)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy(dtype: torch.dtype) -> None:
    logits = draw(64, 10).to(dtype)
    targets = torch.arange(64) % 10
    result = cross_entropy(logits, targets)
    loss, correct, count = public_loss(logits, targets)
    torch.testing.assert_close(result.loss, loss)
    assert torch.equal(result.correct.bool(), correct)
    assert result.stats[1] == count


@pytest.mark.parametrize("joined", [True, False])
def test_both_sides_have_the_same_gradient_statistics(joined: bool) -> None:
    gradients = [draw(48) for _ in range(20)]
    gradients[3][:5] = 0
    own = grad_stats([gradients]).fields[0]
    other = public_statistics(gradients, joined)
    torch.testing.assert_close(own, other, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_sides_normalise_and_pool_alike(dtype: torch.dtype) -> None:
    x = draw(16, 8, 12, 12).to(dtype, memory_format=torch.channels_last)
    own = NormReluPool(8, pool=True).train()(x)
    rtol = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(own, ThreeModules(8).train()(x), rtol=rtol, atol=2e-2)


def test_both_sides_normalise_images_alike() -> None:
    # Random draws differ between the two, so only the steps after them are compared.
    images = draw(4, 8, 8, 3).mul(40).clamp(0, 255).to(torch.uint8)
    own, _ = stage_images(images, torch.arange(4), normalisation_table(MEAN, STD))
    cast, normalise = torchvision_pipeline(8).transforms[2:]
    other = normalise(cast(images.permute(0, 3, 1, 2)))
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
