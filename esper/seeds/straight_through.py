"""Learning straight through: the features pass unchanged, and the gradient that arrives is also that of a delta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

TINY = 1e-30
"""Smallest divisor, for features or deltas that are zero."""


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
