"""Both sides of the case `norm-relu-pool`."""

from __future__ import annotations

import pytest
import torch

from esper.bench.norm_relu_pool import ThreeModules
from esper.ops.norm_relu_pool import NormReluPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_sides_normalise_and_pool_alike(dtype: torch.dtype) -> None:
    shape = (16, 8, 12, 12)
    x = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0))
        .to(dtype)
        .to(memory_format=torch.channels_last)
    )
    sides = [
        module.train()(x) for module in (NormReluPool(8, pool=True), ThreeModules(8))
    ]
    torch.testing.assert_close(
        *sides, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=2e-2
    )
