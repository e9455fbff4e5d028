"""Sequences of tokens out of one long stream: windows that do not overlap, with targets shifted by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from esper.data.task import Split


def windows(tokens: Tensor, length: int) -> Split:
    """Tokens int64 [M] as inputs and targets int64 [N, length]; N = (M − 1) // length, the rest is left out.

    The target of each token is the one that follows it. Windows do not overlap, and every window has ``length`` targets
    out of ``tokens`` itself, so that nothing crosses a border between splits. Inputs and targets share memory.
    """
    count = max(0, len(tokens) - 1) // length
    if count == 0:
        raise ValueError(f"{len(tokens)} tokens make no sequence of {length} with its targets")
    return Split(x=tokens[: count * length].view(count, length), y=tokens[1 : count * length + 1].view(count, length))


def evenly_spaced(split: Split, count: int) -> Split:
    """``count`` rows of the split, spread over all of it; the split itself where it has no more than that."""
    rows = torch.linspace(0, len(split) - 1, min(count, len(split)), dtype=torch.float64).round().long()
    return Split(x=split.x[rows].clone(), y=split.y[rows].clone())


def cut_by_position(total: int, fractions: Sequence[float]) -> list[slice]:
    """Disjoint slices that follow each other, with about these fractions of ``total``; the last takes the rest."""
    borders = [0]
    for fraction in fractions[:-1]:
        borders.append(borders[-1] + int(total * fraction))
    borders.append(total)
    return [slice(first, last) for first, last in pairwise(borders)]
