"""Both sides of the case `cross-entropy`."""

from __future__ import annotations

import pytest
import torch

from esper.bench.cross_entropy import public_loss
from esper.ops.cross_entropy import cross_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.arange(64) % 10
    result = cross_entropy(logits, targets)
    loss, correct, count = public_loss(logits, targets)
    torch.testing.assert_close(result.loss, loss)
    assert torch.equal(result.correct.bool(), correct)
    assert result.stats[1] == count
