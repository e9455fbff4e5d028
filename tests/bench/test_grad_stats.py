"""Both sides of the case `grad-stats`."""

from __future__ import annotations

import pytest
import torch

from esper.bench.grad_stats import public_statistics
from esper.ops.grad_stats import grad_stats


@pytest.mark.parametrize("joined", [True, False])
def test_both_sides_have_the_same_gradient_statistics(joined: bool) -> None:
    gradients = [
        torch.randn(48, generator=torch.Generator().manual_seed(i)) for i in range(20)
    ]
    gradients[3][:5] = 0
    torch.testing.assert_close(
        grad_stats([gradients]).fields[0],
        public_statistics(gradients, joined),
        rtol=2e-6,
        atol=0,
    )
