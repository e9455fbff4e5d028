"""Blending: makes a seed's output f(h) into a delta d and adds it to the host's features, out = h + alpha · d."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.lifecycle.ramps import BlendOperator
from esper.seeds.topologies import SPATIAL

AT_BIRTH = 0.1
"""Factor of a delta at birth, which keeps a new seed small."""


def blend(h: Tensor, delta: Tensor, alpha: Tensor) -> Tensor:
    """Returns h + alpha · delta in the shape and dtype of the features ``h``.

    ``alpha`` is a scalar tensor on the device, so that every replay of a captured step reads its current value.
    """
    return torch.addcmul(h, delta.to(h.dtype), alpha.to(h.dtype))


def gate_parameters(channels: int) -> int:
    """Number of parameters of the gate: Linear(C, H) and Linear(H, 1) with H = max(8, C/4)."""
    hidden = max(8, channels // 4)
    return (channels + 1) * hidden + hidden + 1


def running_mean(h: Tensor) -> Tensor:
    """Returns the gate's input for channels-last features, in the shape and dtype of ``h``.

    [B, D] is returned unchanged. For [B, T, D], position t gets the mean over positions 1 to t, so that no position
    sees a later one. Positions on more than one axis, [B, ..., D], are ordered row-major.
    """
    if h.dim() == 2:
        return h
    positions = h.flatten(1, -2)
    precise = torch.promote_types(h.dtype, torch.float32)  # bfloat16 has too few bits for sums and counts
    count = torch.arange(1, positions.shape[1] + 1, dtype=precise, device=h.device)
    mean = positions.cumsum(dim=1, dtype=precise) / count[:, None]
    return mean.to(h.dtype).reshape(h.shape)


class ChannelScale(nn.Module):
    """The last factor of a blueprint's delta: multiplies each channel by a learned factor that starts at 0.1.

    The factor is small but not zero: with a factor of zero, no other parameter of the body would have a gradient.
    ``shape`` broadcasts over the features: ``ChannelScale(c, 1, 1)`` for [B, C, H, W], ``ChannelScale(d)`` for [B, D]
    and [B, T, D].
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, AT_BIRTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the permutation that undoes ``order``."""
    return tuple(map(order.index, range(len(order))))


class Seed(nn.Module):
    """A blueprint's body with its blend operator; maps features ``h`` to a delta ``d`` of the same shape.

    At a site with a source, ``h`` are the features there, and ``d`` has the shape of those at the sink.

    All parameters, including the gate's, exist from birth, so that the optimizer made then covers all of them.
    ``topology`` gives the layout of ``h``: "cnn" is [B, C, H, W], with one or three spatial dimensions "cnn1d" and
    "cnn3d"; all others, such as "transformer" [B, T, C] and "mlp" [B, C], have the ``channels`` last. In an "encoder",
    [B, T, C], the gate sees all positions, in others of that layout only those up to its own. ``order`` are the
    dimensions of ``h`` in the order of that layout; (): ``h`` has it.
    """

    def __init__(
        self,
        body: nn.Module,
        operator: BlendOperator,
        channels: int,
        topology: str,
        order: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.body = body
        self.operator = operator
        self.topology = topology
        self.order = order
        self.back = inverse(order)
        self.has_buffers = next(body.buffers(), None) is not None
        self.gate: nn.Module | None = None
        if operator is BlendOperator.GATE:
            hidden = max(8, channels // 4)
            self.gate = nn.Sequential(
                nn.Linear(channels, hidden),
                nn.SiLU(),  # not ReLU: all of eight hidden units can start dead, and then the gate never learns
                nn.Linear(hidden, 1),
                nn.Sigmoid(),
            )

    def forward(self, h: Tensor) -> Tensor:
        if not self.order:
            return self._in_order(h)
        delta = self._in_order(h.permute(self.order))
        return delta.permute(self.back)

    def _in_order(self, h: Tensor) -> Tensor:
        precise = torch.promote_types(h.dtype, torch.float32)
        # Features in half precision are promoted: parameters grow with at least 32 bits. Autocast does this by itself.
        if h.dtype == precise or torch.is_autocast_enabled(h.device.type):
            return self._delta(h)
        parameter = next(self.parameters(), None)
        if parameter is not None:
            precise = parameter.dtype  # a grown network may be turned into half
        return self._delta(h.to(precise)).to(h.dtype)

    def _delta(self, h: Tensor) -> Tensor:
        f: Tensor = self.body(h)
        if self.operator is BlendOperator.MULTIPLY:
            return h * torch.tanh(f)
        if self.gate is None:
            return f
        if self.topology in SPATIAL:
            dims = SPATIAL[self.topology]
            g: Tensor = self.gate(h.mean(dim=tuple(range(2, 2 + dims))))  # [B, 1]
            return g[(..., *[None] * dims)] * f
        if self.topology == "encoder":
            return self.gate(h.mean(dim=1, keepdim=True)) * f  # type: ignore[no-any-return]  # [B, 1, 1]
        return self.gate(running_mean(h)) * f  # type: ignore[no-any-return]  # [B, 1] or [B, T, 1]
