"""Loss and accuracy of logits, for classes of images and for tokens of texts; padding counts in neither."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.data.task import PAD


def mean_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy over the targets that count: logits [B, C] with y [B], or [B, T, V] with y [B, T]."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=PAD)


def correct_of(logits: Tensor, y: Tensor) -> Tensor:
    """Targets of each sample that the likeliest class meets, [B]: uint8, 0 or 1, for classes; int16 for tokens."""
    hits = logits.argmax(dim=-1) == y  # padding is no class, and never met
    return hits.to(torch.uint8) if y.dim() == 1 else hits.sum(dim=1, dtype=torch.int16)


def count_of(y: Tensor) -> Tensor:
    """How many targets of y count, int64 scalar on its device."""
    return (y != PAD).sum()
