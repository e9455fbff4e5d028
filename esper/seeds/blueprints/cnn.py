"""Blueprints for convolutional hosts: modules from [B, C, H, W] to a delta of the same shape.

Normalisation is GroupNorm, which has no running statistics, so a seed behaves the same in training and evaluation. The
last factor of every delta is a per-channel scale that starts at 0.1: the delta is small at birth, and yet every
parameter has a gradient within two steps.

Parameter formulas count the whole body: C² and 9C² are convolutions without bias, 9C is a depthwise one, 2C a
GroupNorm, C the scale.
"""

from __future__ import annotations

from torch import Tensor, nn

from esper.seeds.blend import AT_BIRTH, ChannelScale
from esper.seeds.blueprints.registry import BLUEPRINTS


class SqueezeExcite(nn.Module):
    """h · sigmoid(W2 silu(W1 mean(h))): reweights the channels of h [B, C, H, W] by their means over the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = narrow(channels)
        # SiLU, not ReLU: all of the four hidden units for few channels can start dead.
        self.excite = nn.Sequential(nn.Linear(channels, hidden), nn.SiLU(), nn.Linear(hidden, channels), nn.Sigmoid())

    def forward(self, h: Tensor) -> Tensor:
        weights: Tensor = self.excite(h.mean(dim=(2, 3)))  # [B, C]
        return h * weights[:, :, None, None]


def narrow(channels: int) -> int:
    """Returns H, the inner width of narrow bodies: max(4, C // 4)."""
    return max(4, channels // 4)


def group_norm(channels: int) -> nn.GroupNorm:
    """Makes a GroupNorm with the most groups out of 32, 16, ..., 2 that have equal sizes of at least 16, else one."""
    fitting = (g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels // g >= 16)
    return nn.GroupNorm(next(fitting, 1), channels)


def conv_norm_relu(channels: int, out: int, kernel: int) -> list[nn.Module]:
    """Makes a shape-preserving convolution, GroupNorm and ReLU; kernel² · channels · out + 2 · out parameters.

    The normalisation keeps the ReLU alive: every group has values above its mean.
    """
    padding = kernel // 2
    return [nn.Conv2d(channels, out, kernel, padding=padding, bias=False), group_norm(out), nn.ReLU()]


@BLUEPRINTS.register("cnn", "norm", parameters=lambda c: 2 * c)
def norm(channels: int) -> nn.Module:
    """Rescaled GroupNorm: evens out the features' scale; 2C parameters."""
    layer = group_norm(channels)
    nn.init.constant_(layer.weight, AT_BIRTH)
    return layer


@BLUEPRINTS.register("cnn", "attention", parameters=lambda c: 2 * c * narrow(c) + narrow(c) + 2 * c)
def attention(channels: int) -> nn.Module:
    """Squeeze-and-excite: reweights channels by global context; 2CH + H + 2C parameters, H = max(4, C/4)."""
    return nn.Sequential(SqueezeExcite(channels), ChannelScale(channels, 1, 1))


@BLUEPRINTS.register("cnn", "conv_small", parameters=lambda c: c * c + 3 * c)
def conv_small(channels: int) -> nn.Module:
    """One 1×1 convolution; C² + 3C parameters."""
    return nn.Sequential(*conv_norm_relu(channels, channels, 1), ChannelScale(channels, 1, 1))


@BLUEPRINTS.register(
    "cnn", "bottleneck", parameters=lambda c: 2 * c * narrow(c) + 9 * narrow(c) ** 2 + 4 * narrow(c) + 3 * c
)
def bottleneck(channels: int) -> nn.Module:
    """1×1 down to H channels, 3×3, 1×1 up; 2CH + 9H² + 4H + 3C parameters, H = max(4, C/4)."""
    hidden = narrow(channels)
    return nn.Sequential(
        *conv_norm_relu(channels, hidden, 1),
        *conv_norm_relu(hidden, hidden, 3),
        *conv_norm_relu(hidden, channels, 1),
        ChannelScale(channels, 1, 1),
    )


@BLUEPRINTS.register("cnn", "depthwise", parameters=lambda c: c * c + 12 * c)
def depthwise(channels: int) -> nn.Module:
    """3×3 depthwise and 1×1 pointwise convolution; C² + 12C parameters."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
        *conv_norm_relu(channels, channels, 1),
        ChannelScale(channels, 1, 1),
    )


@BLUEPRINTS.register("cnn", "conv_light", parameters=lambda c: 9 * c * c + 3 * c)
def conv_light(channels: int) -> nn.Module:
    """One 3×3 convolution; 9C² + 3C parameters."""
    return nn.Sequential(*conv_norm_relu(channels, channels, 3), ChannelScale(channels, 1, 1))


@BLUEPRINTS.register("cnn", "conv_heavy", parameters=lambda c: 18 * c * c + 5 * c)
def conv_heavy(channels: int) -> nn.Module:
    """Two 3×3 convolutions; 18C² + 5C parameters."""
    return nn.Sequential(
        *conv_norm_relu(channels, channels, 3), *conv_norm_relu(channels, channels, 3), ChannelScale(channels, 1, 1)
    )
