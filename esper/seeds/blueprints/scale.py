"""The last factor of a blueprint's delta, which keeps a seed small at birth and its gradients alive."""

from __future__ import annotations

import torch
from torch import Tensor, nn

AT_BIRTH = 0.1


class ChannelScale(nn.Module):
    """Multiplies each channel by a learned factor that starts at 0.1.

    The factor is small but not zero: with a factor of zero, no other parameter of the body would have a gradient.
    ``shape`` broadcasts over the features: ``ChannelScale(c, 1, 1)`` for [B, C, H, W], ``ChannelScale(d)`` for [B, D]
    and [B, T, D].
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, AT_BIRTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight
