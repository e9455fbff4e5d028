"""The loss and the number of targets, for image classes and for text tokens; padding is ignored."""

from __future__ import annotations

from torch import Tensor

from esper.data.task import PAD
from esper.ops import CrossEntropy, cross_entropy


def measured_loss(logits: Tensor, y: Tensor) -> CrossEntropy:
    """Returns the mean cross-entropy without padding, and its statistics: logits [B, C], or [B, T, V] with y [B, T]."""
    return cross_entropy(logits, y, ignore_index=PAD)


def count_of(y: Tensor) -> Tensor:
    """Returns the number of targets of y that are not padding, an int64 scalar on its device."""
    return (y != PAD).sum()
