"""References for the kernels: the same operators in plain public PyTorch, slow and obvious."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def grad_stats_twin(
    groups: Iterable[Sequence[Tensor | None]],
    max_norm: float = 1.0,
    exploding_norm: float = 10.0,
) -> tuple[Tensor, Tensor]:
    """Return ``(fields [G, 13], norms [N])`` in float64, computed in float64 throughout."""
    rows: list[Tensor] = []
    norms: list[Tensor] = []
    for group in groups:
        present = [
            gradient.detach().double() for gradient in group if gradient is not None
        ]
        group_norms = [gradient.square().sum().sqrt() for gradient in present]
        norms += group_norms
        measured = [
            norm
            for norm, gradient in zip(group_norms, present, strict=True)
            if gradient.numel() > 0
        ]
        rows.append(_row(present, measured, max_norm, exploding_norm))
    empty = torch.empty(0, dtype=torch.float64)
    return (
        torch.stack(rows) if rows else empty.reshape(0, 13),
        torch.stack(norms) if norms else empty,
    )


def _row(
    present: list[Tensor],
    measured: list[Tensor],
    max_norm: float,
    exploding_norm: float,
) -> Tensor:
    """One row of fields ``[13]``, in the order of ``FIELDS``."""
    device = present[0].device if present else torch.device("cpu")
    zero = torch.zeros((), dtype=torch.float64, device=device)

    def total(values: Iterable[Tensor]) -> Tensor:
        return sum((value.sum().double() for value in values), zero)

    sum_sq = total(gradient.square() for gradient in present)
    norm = sum_sq.sqrt()
    norms = torch.stack(measured) if measured else zero.reshape(1)[:0]
    tensors = zero + len(measured)
    vanishing = (norms < 1e-7).sum().double()
    exploding = ((norms > exploding_norm) | ~norms.isfinite()).sum().double()
    usable = bool(norm.isfinite())
    health = (
        (1 - (0.5 * vanishing + 0.8 * exploding) / tensors).clamp(0, 1)
        if usable and measured
        else zero
    )
    clip = (max_norm / (norm + 1e-6)).clamp(max=1.0) if usable else zero
    return torch.stack(
        [
            sum_sq,
            norm,
            tensors,
            zero + sum(gradient.numel() for gradient in present),
            norms.amin() if measured else zero,
            norms.amax() if measured else zero,
            vanishing,
            exploding,
            total(gradient.isnan() for gradient in present),
            total(gradient.isinf() for gradient in present),
            total(gradient == 0 for gradient in present),
            health,
            clip,
        ]
    )


def norm_relu_pool_twin(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor] | None,
    eps: float,
    pool: bool,
) -> Tensor:
    """The three PyTorch functions; statistics of the batch where none are given."""
    mean, variance = (None, None) if running is None else running
    y = F.relu(
        F.batch_norm(x, mean, variance, weight, bias, training=running is None, eps=eps)
    )
    return F.max_pool2d(y, 2) if pool else y
