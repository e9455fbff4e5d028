"""`cross_entropy` again, in plain public PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy_twin(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(loss [], correct [B] or [B, T] uint8, stats [5])``, computed in float64 throughout."""
    flat, t = logits.double().flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(
        flat, t, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    each = F.cross_entropy(
        flat,
        t,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    counted = t != ignore_index
    correct = (flat.argmax(dim=1) == t) & counted
    losses = each.detach()[counted]
    stats = torch.stack(
        [
            losses.sum(),
            correct.sum().double(),
            counted.sum().double(),
            torch.ones((), dtype=torch.float64, device=logits.device),
            (~losses.isfinite()).sum().double(),
        ]
    )
    return loss, correct.view(targets.shape).to(torch.uint8), stats


def difficult_rows(classes: int) -> Tensor:
    """float32 ``[11, C]`` logits with extremes, NaN and ties in first, middle and last places."""
    torch.manual_seed(classes)
    rows = torch.randn(11, classes)
    middle, last = classes // 2, classes - 1
    inf, nan = float("inf"), float("nan")
    rows[0] *= 1e4
    rows[1] -= 1e4
    rows[2, middle] = -inf
    rows[3] = -inf
    rows[4] = -inf
    rows[4, last] = 3.0
    rows[5, last] = inf
    rows[6, 0] = rows[6, last] = inf
    rows[7, middle] = nan
    rows[8, 0] = rows[8, last] = nan
    rows[9] = 0.0  # all tie
    rows[10, middle:] = rows[10].max()  # some tie
    return rows
