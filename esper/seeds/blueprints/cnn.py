"""Blueprints for convolutional hosts: modules from [B, C, H, W] to a delta of the same shape.

Normalisation is GroupNorm: it has no running statistics, so a seed has no state that evaluation and training see
differently. The last factor of every delta is a per-channel scale that starts at 0.1: small at birth, and yet every
parameter has a gradient from the first step on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.seeds.blueprints.registry import BLUEPRINTS

SCALE_AT_BIRTH = 0.1


class ChannelScale(nn.Module):
    """Multiplies channel c of [B, C, H, W] by a learned factor."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels, 1, 1), SCALE_AT_BIRTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class SqueezeExcite(nn.Module):
    """h · sigmoid(W2 silu(W1 mean(h))): channels reweighted by what the whole image shows."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(4, channels // 4)
        # SiLU, not ReLU: with four hidden units on few channels all of them can start dead.
        self.excite = nn.Sequential(nn.Linear(channels, hidden), nn.SiLU(), nn.Linear(hidden, channels), nn.Sigmoid())

    def forward(self, h: Tensor) -> Tensor:
        weights: Tensor = self.excite(h.mean(dim=(2, 3)))  # [B, C]
        return h * weights[:, :, None, None]


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with the most groups of 32, 16, ..., 2 that divide the channels and keep 16 in each, else one."""
    fitting = (g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels // g >= 16)
    return nn.GroupNorm(next(fitting, 1), channels)


@BLUEPRINTS.register("cnn", "norm", parameters=lambda c: 2 * c)
def norm(channels: int) -> nn.Module:
    """Rescaled GroupNorm: evens out the features' scale; 2C parameters."""
    layer = group_norm(channels)
    nn.init.constant_(layer.weight, SCALE_AT_BIRTH)
    return layer


@BLUEPRINTS.register("cnn", "conv_light", parameters=lambda c: 9 * c * c + 3 * c)
def conv_light(channels: int) -> nn.Module:
    """One 3×3 convolution; 9C² + 3C parameters."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        group_norm(channels),
        nn.ReLU(),
        ChannelScale(channels),
    )


@BLUEPRINTS.register("cnn", "depthwise", parameters=lambda c: c * c + 12 * c)
def depthwise(channels: int) -> nn.Module:
    """3×3 depthwise and 1×1 pointwise convolution; C² + 12C parameters."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        group_norm(channels),
        nn.ReLU(),
        ChannelScale(channels),
    )


@BLUEPRINTS.register("cnn", "attention", parameters=lambda c: 2 * c * max(4, c // 4) + max(4, c // 4) + 2 * c)
def attention(channels: int) -> nn.Module:
    """Squeeze-and-excite: reweights channels by global context; 2CH + H + 2C parameters, H = max(4, C/4)."""
    return nn.Sequential(SqueezeExcite(channels), ChannelScale(channels))
