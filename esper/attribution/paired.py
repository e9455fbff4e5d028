"""Paired differences: two configurations compared sample by sample on the same samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """An accuracy difference on the same samples and its standard error, both pp."""

    difference: float
    error: float


def paired(d: Floats, counts: Floats) -> Paired:
    """Returns the accuracy difference for per-sample differences d [n] of correct targets, out of c [n] targets.

    The ratio r = Σd / Σc has standard error √(n/(n−1) · Σ(d − r·c)²) / Σc (Cochran, Sampling Techniques, 6.4); if
    every sample has one target, that is std(d)/√n.
    """
    n = len(d)
    total = counts.sum()
    r = d.sum() / total
    spread = ((d - r * counts) ** 2).sum() * n / (n - 1)
    return Paired(100 * float(r), 100 * float(np.sqrt(spread) / total))
