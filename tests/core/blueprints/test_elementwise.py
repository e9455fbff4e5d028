"""Layers that change each element of their input by itself are found by trying them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.core.blueprints.elementwise import is_elementwise


class Swish(nn.Module):
    """An activation as libraries write their own."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class OwnDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Reversed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1)


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        (Swish(), True),
        (nn.GELU(), True),
        (nn.Softmax(dim=-1), False),
        (nn.LayerNorm(4, elementwise_affine=False), False),
        (nn.PReLU(), False),
        (OwnDropout(), False),
        (Reversed(), False),
        (nn.Flatten(), False),
        (nn.Bilinear(4, 4, 4), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_activations_of_other_libraries_are_found_by_trying_them(
    layer: nn.Module, wanted: bool
) -> None:
    assert is_elementwise(layer) is wanted


def test_an_activation_is_tried_with_its_hooks() -> None:
    layer = nn.ReLU()
    layer.register_forward_hook(lambda _layer, _args, output: output.clone())
    assert is_elementwise(layer)
    layer.register_forward_hook(lambda _layer, _args, output: output.flip(-1))
    assert not is_elementwise(layer)
