"""Targets that count, for classes of images and for tokens of texts; padding counts in neither."""

from __future__ import annotations

from torch import Tensor

from esper.data.task import PAD
from esper.ops import CrossEntropy, cross_entropy


def measured_loss(logits: Tensor, y: Tensor) -> CrossEntropy:
    """Mean cross-entropy over targets that count, with its statistics: logits [B, C], or [B, T, V] with y [B, T]."""
    return cross_entropy(logits, y, ignore_index=PAD)


def count_of(y: Tensor) -> Tensor:
    """How many targets of y count, int64 scalar on its device."""
    return (y != PAD).sum()
