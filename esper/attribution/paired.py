"""Paired differences: two configurations on the same samples, compared sample by sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """A difference of accuracies on the same samples, with its standard error; both pp."""

    difference: float
    error: float


def paired(d: Floats, counts: Floats) -> Paired:
    """Difference of accuracies from per-sample differences d [n] of targets met, of counts c [n] each.

    The ratio r = Σd / Σc has standard error √(n/(n−1) · Σ(d − r·c)²) / Σc (Cochran, Sampling Techniques, 6.4); where
    every sample counts once, that is std(d)/√n.
    """
    n, total = len(d), counts.sum()
    r = d.sum() / total
    spread = ((d - r * counts) ** 2).sum() * n / (n - 1)
    return Paired(100 * float(r), 100 * float(np.sqrt(spread) / total))
