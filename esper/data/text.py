"""Sequences from one long stream of tokens: non-overlapping windows with targets shifted by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from esper.data.task import Split


def windows(tokens: Tensor, length: int) -> Split:
    """Cuts tokens int64 [M] into inputs and targets int64 [N, length]; N = (M − 1) // length, the rest is dropped.

    The target of a token is the next one. Windows do not overlap, and all targets come from ``tokens`` itself, so that
    no window crosses a border between splits. Inputs and targets share memory. Raises ValueError if N would be 0.
    """
    count = max(0, len(tokens) - 1) // length
    if count == 0:
        raise ValueError(f"{len(tokens)} tokens make no sequence of {length} with its targets")
    return Split.of_text(tokens[: count * length + 1], length)


def evenly_spaced(split: Split, count: int) -> Split:
    """Returns a copy of ``count`` rows spread evenly over the split, or of all rows if there are no more."""
    rows = torch.linspace(0, len(split) - 1, min(count, len(split)), dtype=torch.float64).round().long()
    return Split(x=split.x[rows].clone(), y=split.y[rows].clone())


def cut_by_position(total: int, fractions: Sequence[float]) -> list[slice]:
    """Returns consecutive slices with about these fractions of ``total``; the last slice takes the rest."""
    borders = [0]
    for fraction in fractions[:-1]:
        borders.append(borders[-1] + int(total * fraction))
    borders.append(total)
    return [slice(first, last) for first, last in pairwise(borders)]
