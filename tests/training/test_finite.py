"""Values that are not finite are counted where a network must not have any."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from esper.training.finite import count_not_finite, finite_buffers


class Masked(nn.Module):
    """A norm, and a mask that is infinite from the start."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))


def test_only_buffers_that_were_finite_are_watched() -> None:
    network = Masked()
    watched = finite_buffers(network)
    # The number of batches is an integer, which is finite always.
    assert watched == {"norm.running_mean", "norm.running_var"}
    assert float(count_not_finite(network, watched, network.parameters())) == 0.0


def test_every_bad_value_of_parameters_and_buffers_is_counted() -> None:
    network = Masked()
    watched = finite_buffers(network)
    with torch.no_grad():
        network.norm.weight[:2] = math.nan
        network.norm.bias[0] = math.inf
    network.norm.running_mean[1] = -math.inf  # type: ignore[index]
    counted = count_not_finite(network, watched, network.parameters())
    assert counted.dtype == torch.float64
    assert float(counted) == 4.0
    assert float(count_not_finite(network, (), [network.norm.bias])) == 1.0
