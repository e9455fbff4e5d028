"""Blueprints for convolutional hosts: modules from [B, C, H, W] to a delta of the same shape.

Those of "cnn1d" work on [B, C, T], those of "cnn3d" on volumes [B, C, D, H, W]; kernels have a side of 3 in each
dimension.

Normalisation is GroupNorm, which has no running statistics, so a seed behaves the same in training and evaluation. The
last factor of every delta is a per-channel scale that starts at 0.1: the delta is small at birth, and yet every
parameter has a gradient within two steps.

Parameter formulas count the whole body: C² and KC² are convolutions without bias, KC is a depthwise one, 2C a
GroupNorm, C the scale. K is the volume of a kernel: 9 for images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from esper.core.blend import AT_BIRTH, ChannelScale
from esper.core.blueprints.registry import BLUEPRINTS, Blueprint
from esper.core.place import SPATIAL

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
"""Convolutions by number of spatial dimensions."""

Build = Callable[[int, int], nn.Module]
"""Makes a body from the number of channels and of spatial dimensions."""


def convolutional(name: str, parameters: Callable[[int, int], int]) -> Callable[[Build], Build]:
    """Registers a factory for all convolutional hosts.

    ``parameters`` are those for a number of channels and a volume of kernels.
    """

    def decorate(build: Build) -> Build:
        words = (build.__doc__ or "").strip().partition("\n")[0]
        for topology, dims in SPATIAL.items():
            size = partial(parameters, k=3**dims)  # type: ignore[call-arg]
            BLUEPRINTS.add(Blueprint(topology, name, words, partial(build, dims=dims), size))  # type: ignore[call-arg]
        return build

    return decorate


class SqueezeExcite(nn.Module):
    """h · sigmoid(W2 silu(W1 mean(h))): reweights the channels of h [B, C, ...] by their means over all positions."""

    def __init__(self, channels: int, dims: int = 2) -> None:
        super().__init__()
        self.dims = dims
        hidden = narrow(channels)
        self.excite = nn.Sequential(
            nn.Linear(channels, hidden),
            nn.SiLU(),  # not ReLU: all of the four hidden units for few channels can start dead
            nn.Linear(hidden, channels),
            nn.Sigmoid(),
        )

    def forward(self, h: Tensor) -> Tensor:
        means = h.mean(dim=tuple(range(2, 2 + self.dims)))
        weights: Tensor = self.excite(means)  # [B, C]
        return h * weights[(..., *[None] * self.dims)]


def narrow(channels: int) -> int:
    """Returns H, the inner width of narrow bodies: max(4, C // 4)."""
    return max(4, channels // 4)


def group_norm(channels: int) -> nn.GroupNorm:
    """Makes a GroupNorm with the most groups out of 32, 16, ..., 2 that have equal sizes of at least 16, else one."""
    for groups in (32, 16, 8, 4, 2):
        if channels % groups == 0 and channels // groups >= 16:
            return nn.GroupNorm(groups, channels)
    return nn.GroupNorm(1, channels)


def channel_scale(channels: int, dims: int) -> ChannelScale:
    """Makes the scale of features [B, C, ...] with ``dims`` spatial dimensions."""
    return ChannelScale(channels, *[1] * dims)


def conv_norm_relu(
    channels: int,
    out: int,
    kernel: int,
    dims: int,
) -> list[nn.Module]:
    """Makes a shape-preserving convolution with a kernel of this side, GroupNorm and ReLU.

    It has kernel^dims · channels · out + 2 · out parameters.

    The normalisation keeps the ReLU alive: every group has values above its mean.
    """
    convolution = CONVOLUTIONS[dims](channels, out, kernel, padding=kernel // 2, bias=False)
    return [convolution, group_norm(out), nn.ReLU()]


@convolutional("norm", parameters=lambda c, k: 2 * c)
def norm(channels: int, dims: int = 2) -> nn.Module:
    """Rescaled GroupNorm: evens out the features' scale; 2C parameters."""
    layer = group_norm(channels)
    nn.init.constant_(layer.weight, AT_BIRTH)
    return layer


@convolutional(
    "attention",
    parameters=lambda c, k: 2 * c * narrow(c) + narrow(c) + 2 * c,
)
def attention(channels: int, dims: int = 2) -> nn.Module:
    """Squeeze-and-excite: reweights channels by global context; 2CH + H + 2C parameters, H = max(4, C/4)."""
    return nn.Sequential(
        SqueezeExcite(channels, dims),
        channel_scale(channels, dims),
    )


@convolutional("conv_small", parameters=lambda c, k: c * c + 3 * c)
def conv_small(channels: int, dims: int = 2) -> nn.Module:
    """One 1×1 convolution; C² + 3C parameters."""
    return nn.Sequential(
        *conv_norm_relu(channels, channels, 1, dims),
        channel_scale(channels, dims),
    )


@convolutional(
    "bottleneck",
    parameters=lambda c, k: 2 * c * narrow(c) + k * narrow(c) ** 2 + 4 * narrow(c) + 3 * c,
)
def bottleneck(channels: int, dims: int = 2) -> nn.Module:
    """1×1 down to H channels, 3×3, 1×1 up; 2CH + 9H² + 4H + 3C parameters, H = max(4, C/4)."""
    hidden = narrow(channels)
    return nn.Sequential(
        *conv_norm_relu(channels, hidden, 1, dims),
        *conv_norm_relu(hidden, hidden, 3, dims),
        *conv_norm_relu(hidden, channels, 1, dims),
        channel_scale(channels, dims),
    )


@convolutional("depthwise", parameters=lambda c, k: c * c + (k + 3) * c)
def depthwise(channels: int, dims: int = 2) -> nn.Module:
    """3×3 depthwise and 1×1 pointwise convolution; C² + 12C parameters."""
    return nn.Sequential(
        CONVOLUTIONS[dims](channels, channels, 3, padding=1, groups=channels, bias=False),
        *conv_norm_relu(channels, channels, 1, dims),
        channel_scale(channels, dims),
    )


@convolutional("conv_light", parameters=lambda c, k: k * c * c + 3 * c)
def conv_light(channels: int, dims: int = 2) -> nn.Module:
    """One 3×3 convolution; 9C² + 3C parameters."""
    return nn.Sequential(
        *conv_norm_relu(channels, channels, 3, dims),
        channel_scale(channels, dims),
    )


@convolutional("conv_heavy", parameters=lambda c, k: 2 * k * c * c + 5 * c)
def conv_heavy(channels: int, dims: int = 2) -> nn.Module:
    """Two 3×3 convolutions; 18C² + 5C parameters."""
    return nn.Sequential(
        *conv_norm_relu(channels, channels, 3, dims),
        *conv_norm_relu(channels, channels, 3, dims),
        channel_scale(channels, dims),
    )
