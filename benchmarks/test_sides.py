"""Both sides of the cases of `esper-bench` compute the same."""

from __future__ import annotations

import pytest
import torch

from esper.bench import sgd
from esper.bench.case import BenchArgs
from esper.bench.cross_entropy import public_loss
from esper.bench.grad_stats import public_statistics
from esper.bench.norm_relu_pool import ThreeModules
from esper.bench.stage_batch import MEAN, STD, torchvision_pipeline
from esper.ops import NormReluPool, cross_entropy, grad_stats, normalisation_table, stage_images


@pytest.mark.parametrize("joined", [True, False])
def test_gradient_statistics(joined: bool) -> None:
    gradients = [torch.randn(48, generator=torch.Generator().manual_seed(i)) for i in range(20)]
    gradients[3][:5] = 0
    torch.testing.assert_close(
        grad_stats([gradients]).fields[0], public_statistics(gradients, joined), rtol=2e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.arange(64) % 10
    result = cross_entropy(logits, targets)
    loss, correct, count = public_loss(logits, targets)
    torch.testing.assert_close(result.loss, loss)
    assert torch.equal(result.correct.bool(), correct)
    assert result.stats[1] == count


def test_staging_normalises_alike() -> None:
    # Random draws differ between the two, so only the steps after them are compared.
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    own, _ = stage_images(images, torch.arange(4), normalisation_table(MEAN, STD))
    cast, normalise = torchvision_pipeline(8).transforms[2:]
    torch.testing.assert_close(own, normalise(cast(images.permute(0, 3, 1, 2))), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalise_relu_and_pool(dtype: torch.dtype) -> None:
    shape = (16, 8, 12, 12)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(memory_format=torch.channels_last)
    sides = [module.train()(x) for module in (NormReluPool(8, pool=True), ThreeModules(8))]
    torch.testing.assert_close(*sides, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=2e-2)


def test_clipped_steps() -> None:
    (comparison,) = sgd.comparisons(BenchArgs(sizes=((3, 8),)))
    sides = [run.args[0] for run in (comparison.run, comparison.run_baseline)]  # type: ignore[attr-defined]
    before = [parameter.clone() for optimizer in sides[0] for parameter in optimizer.param_groups[0]["params"]]
    comparison.run()
    comparison.run_baseline()  # once: torch's step leaves its gradients scaled
    own, other = (
        [parameter for optimizer in side for parameter in optimizer.param_groups[0]["params"]] for side in sides
    )
    torch.testing.assert_close(own, other)
    assert not any(torch.equal(then, now) for then, now in zip(before, own, strict=True))
