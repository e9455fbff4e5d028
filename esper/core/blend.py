"""Blending: makes a seed's output f(h) into a delta d and adds it to the host's features, out = h + alpha · d.

An incubating seed may learn straight through: the features pass unchanged, and the gradient that arrives there is also
that of its delta.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn import functional

from esper.core.place import SPATIAL
from esper.core.ramps import BlendOperator

CONTAINER = "grown_seeds"
"""Name of the submodule that registers kept seeds."""
GROWING = "_growing_seeds"
"""Name of the attribute that holds growing seeds. It is not registered: torch does not see them."""

AT_BIRTH = 0.1
"""Factor of a delta at birth, which keeps a new seed small."""
TINY = 1e-30
"""Smallest divisor, for features or deltas that are zero."""


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

    leading: int | None = None
    """Number of first channels that it reads and adds to, where its layer has grown since; None: all channels."""

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
        self.channels = channels
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
            return self._of_leading(h)
        delta = self._of_leading(h.permute(self.order))
        return delta.permute(self.back)

    def keep_channels(self) -> None:
        """Keeps to the channels that there are, which stay the first ones when its layer grows."""
        self.leading = self.channels

    def _of_leading(self, h: Tensor) -> Tensor:
        if self.leading is None:
            return self._in_order(h)
        spatial = SPATIAL.get(self.topology, 0)
        dim = -1 - spatial  # of the channels
        delta = self._in_order(h.narrow(dim, 0, self.leading))
        others = h.shape[dim] - self.leading
        no_positions = [0, 0] * spatial
        return functional.pad(delta, (*no_positions, 0, others))

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


def pass_through(h: Tensor, d: Tensor) -> Tensor:
    """Returns a copy of the features ``h``; in the backward pass, the delta ``d`` learns from their gradient.

    That objective is linear in d and rewards unlimited growth. So ∂loss/∂out is the gradient of min(1, ‖h‖/‖d‖) · d,
    whose RMS is at most that of h: at the limit d can turn, but gains nothing by growing. Orthogonal steps still grow
    the norm, so above the limit a restoring gradient is added, proportional to the relative excess and to the
    gradient's norm.

    Args:
        h: features of any shape and floating dtype.
        d: a delta of the same shape, in float32 or float64.
    """
    return _PassThrough.apply(h, d)  # type: ignore[no-any-return, no-untyped-call]


class _PassThrough(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, h: Tensor, d: Tensor) -> Tensor:
        context.save_for_backward(d, vector_norm(h, dtype=d.dtype))
        return h.clone()

    @staticmethod
    def jvp(_context: Any, of_h: Tensor | None, _of_d: Tensor | None) -> Tensor | None:
        return None if of_h is None else of_h.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        d, size_h = context.saved_tensors
        g = gradient.to(d.dtype)
        size_d = vector_norm(d)
        # A CPU reads the sizes without waiting, and most deltas are within the limit.
        if d.is_cpu and max(size_d.item(), TINY) <= size_h.item():
            return gradient, g
        return gradient, limited(g, d, size_h, size_d)


def limited(
    g: Tensor,
    d: Tensor,
    size_h: Tensor,
    size_d: Tensor,
) -> Tensor:
    """Returns the gradient of the delta ``d``: the arriving gradient ``g`` if ‖d‖ ≤ ‖h‖, else the limited one.

    Written out, in two reductions and three passes over the features. Sizes are norms, scalars on the device.
    """
    size_d = size_d.clamp(min=TINY)
    ratio = size_d / size_h.clamp(min=TINY)
    scale = (size_h / size_d).clamp(max=1)

    # Above the limit ‖scale · d‖ is constant, so the part of the gradient along d drops out:
    # ∂/∂d = scale · (g − d (g·d) / ‖d‖²).
    above = ratio > 1
    along = (g * d).sum() / size_d  # g · d/‖d‖
    radial = torch.where(above, scale * along / size_d, 0.0)

    # ‖∂/∂d‖² = scale² (‖g‖² − along²), needed only above the limit, where it scales the restoring gradient.
    across = (vector_norm(g).square() - along.square()).clamp(min=0).sqrt()
    excess = (ratio - 1).clamp(min=0)
    restoring = excess * scale * across / size_d
    return torch.addcmul(scale * g, d, restoring - radial)
