"""Gradients that cannot be differentiated again."""

from __future__ import annotations

import pytest
import torch

from esper.ops.once import Once


def test_a_gradient_is_passed_on_and_differentiating_it_is_an_error() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    gradient = Once.apply("only once", torch.tensor([2.0]), x)
    assert gradient.tolist() == [2.0]
    with pytest.raises(RuntimeError, match="only once"):
        gradient.sum().backward()
