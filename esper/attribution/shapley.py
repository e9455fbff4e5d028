"""Shapley values of seeds: each seed's contribution, averaged over all orders of switching the seeds on.

A coalition is a set of slots that are on; its value is the accuracy of the network with only these on. The value
of slot i is φ_i = Σ over coalitions S without i of |S|! (n−|S|−1)! / n! · (v(S ∪ i) − v(S)) (Shapley 1953), so that all
φ add up to v(all) − v(none). Coalitions have per-sample results, and so does φ: errors are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import factorial

import numpy as np
from numpy.typing import NDArray

from esper.attribution.paired import Paired, paired

Floats = NDArray[np.float64]
Coalition = frozenset[str]

EXACT_UP_TO = 4
"""Max number of blended slots for which a costly plan measures all 2^n coalitions."""


def coalitions(slots: Sequence[str]) -> list[Coalition]:
    """Returns all subsets of ``slots``, smallest first."""
    return [frozenset(chosen) for size in range(len(slots) + 1) for chosen in combinations(slots, size)]


def exact(slots: Sequence[str], correct: Mapping[Coalition, Floats], counts: Floats) -> dict[str, Paired]:
    """Returns Shapley values from the results [n] of all coalitions, with the paired error over samples; pp.

    ``correct`` are the correct targets in each sample, out of ``counts`` [n].
    """
    n = len(slots)
    found = {}
    for slot in slots:
        d = np.zeros_like(counts)
        for without in coalitions([other for other in slots if other != slot]):
            weight = factorial(len(without)) * factorial(n - len(without) - 1) / factorial(n)
            d += weight * (correct[without | {slot}] - correct[without])
        found[slot] = paired(d, counts)
    return found


def sampled(
    slots: Sequence[str],
    measure: Callable[[Coalition], Floats],
    counts: Floats,
    pairs: int,
    rng: np.random.Generator,
) -> dict[str, Paired]:
    """Returns Shapley values, pp, estimated from ``pairs`` random orders, each paired with its reverse.

    The pairs are antithetic: the errors of an order and its reverse tend to cancel. ``measure`` returns the results
    [n] of one coalition and is called once for each. The error is √(a² + b²), where a is the paired error over samples
    and b the standard error of the mean over pairs of orders. Raises ValueError for fewer than two pairs.
    """
    if pairs < 2:
        raise ValueError(f"an error over orders wants two pairs of them or more, not {pairs}")
    known: dict[Coalition, Floats] = {}

    def results(coalition: Coalition) -> Floats:
        if coalition not in known:
            known[coalition] = measure(coalition)
        return known[coalition]

    gains = {slot: np.zeros((pairs, len(counts))) for slot in slots}
    for pair in range(pairs):
        order = [slots[place] for place in rng.permutation(len(slots))]
        for direction in (order, order[::-1]):
            for place, slot in enumerate(direction):
                before = frozenset(direction[:place])
                gains[slot][pair] += (results(before | {slot}) - results(before)) / 2
    found = {}
    for slot, gain in gains.items():
        mean = paired(gain.mean(axis=0), counts)
        of_orders = 100 * gain.sum(axis=1) / counts.sum()
        error = np.hypot(mean.error, of_orders.std(ddof=1) / np.sqrt(pairs))
        found[slot] = Paired(mean.difference, float(error))
    return found
