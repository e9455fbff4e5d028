"""Paired differences of two configurations on the same samples, and Shapley values of seeds, which consist of them.

A Shapley value is a seed's contribution, averaged over all orders of switching the seeds on.

A coalition is a set of slots that are on; its value is the accuracy of the network with only these on. The value
of slot i is φ_i = Σ over coalitions S without i of |S|! (n−|S|−1)! / n! · (v(S ∪ i) − v(S)) (Shapley 1953), so that all
φ add up to v(all) − v(none). Coalitions have per-sample results, and so does φ: errors are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Coalition = frozenset[str]

EXACT_UP_TO = 4
"""Max number of seeds that are on for which a costly plan measures all 2^n coalitions."""


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


def coalitions(slots: Sequence[str]) -> list[Coalition]:
    """Returns all subsets of ``slots``, smallest first."""
    subsets: list[Coalition] = []
    for size in range(len(slots) + 1):
        subsets += map(frozenset, combinations(slots, size))
    return subsets


def exact(slots: Sequence[str], correct: Mapping[Coalition, Floats], counts: Floats) -> dict[str, Paired]:
    """Returns Shapley values from the results [n] of all coalitions, with the paired error over samples; pp.

    ``correct`` are the correct targets in each sample, out of ``counts`` [n].
    """
    n = len(slots)
    values = {}
    for slot in slots:
        d = np.zeros_like(counts)
        others = [other for other in slots if other != slot]
        for without in coalitions(others):
            # The share of the orders of switching on in which exactly these come before the slot.
            size = len(without)
            weight = factorial(size) * factorial(n - size - 1) / factorial(n)
            d += weight * (correct[without | {slot}] - correct[without])
        values[slot] = paired(d, counts)
    return values
