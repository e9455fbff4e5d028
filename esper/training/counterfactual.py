"""Counterfactual configurations of one host, and the contributions of seeds that follow from their results.

All statistics are paired: configurations are evaluated on the same samples, and differences are taken per sample.

A Shapley value is a seed's contribution, averaged over all orders of switching the seeds on. A coalition is a set of
slots that are on; its value is the accuracy of the network with only these on. The value of slot i is
φ_i = Σ over coalitions S without i of |S|! (n−|S|−1)! / n! · (v(S ∪ i) − v(S)) (Shapley 1953), so that all φ add up to
v(all) − v(none). Coalitions have per-sample results, and so does φ: errors are paired.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from esper.core.site import Site

if TYPE_CHECKING:
    from esper.training.validate import Configuration

Floats = NDArray[np.float64]
Coalition = frozenset[str]

ALL_OFF: Coalition = frozenset()

EXACT_UP_TO = 4
"""Max number of seeds that are on for which a costly plan measures all 2^n coalitions."""
PAIRED_SEEDS = (3, 4)
"""Numbers of seeds that are on at which pairs are measured: a pair of two is all on; more make too many."""
MAX_PAIRS = math.comb(max(PAIRED_SEEDS), 2)


def max_configurations(slots: int) -> int:
    """Max configurations of a plan: three fixed ones, each slot off, each alone or on trial, and the pairs."""
    return 3 + 2 * slots + MAX_PAIRS


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
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            d += weight * (correct[without | {slot}] - correct[without])
        values[slot] = paired(d, counts)
    return values


class CounterfactualHelper:
    """The configurations of one env's last validation and the result of each sample in each of them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Clears all plans and results, as at the start of an episode."""
        self.row_of: dict[Coalition | str, int] = {}
        """Row of a configuration, by the slots that are on, or by the slot whose seed is on trial beside all on."""
        self.configurations: list[Configuration] = []
        self.on: list[str] = []
        """Slots of the seeds in the forward pass: blended ones and fossils."""
        self.all_on = ALL_OFF
        """The coalition of these slots."""
        self.committed = ALL_OFF
        """The coalition of those with a fossil."""
        self.costly = False
        self.lean = False
        self.correct: NDArray[np.float64] = np.zeros((0, 0))
        self.counts: NDArray[np.float64] = np.zeros(0)
        self.loss: NDArray[np.float64] = np.zeros(0)
        self.accuracies: list[float] = []
        """By row, pp."""

    def plan(self, sites: list[Site], costly: bool, lean: bool = False) -> list[Configuration]:
        """Returns the distinct configurations to evaluate for ``sites`` (execution order); forgets earlier results.

        They are all on (blended seeds and fossils), all off, committed, all on without each one, and each incubating
        seed on trial at its target alpha. ``costly`` adds each alone, and pairs if 3 or 4 are on.

        A ``lean`` plan has at most two configurations and one for each living seed: it leaves out all on without a
        fossil, and all off while two or more seeds are blended beside fossils.
        """
        self.reset()
        alphas = {}
        fossils = []
        for site in sites:
            if site.on:
                alphas[site.name] = site.alpha
            if site.fossil:
                fossils.append(site.name)
        self.on = list(alphas)
        self.all_on = frozenset(alphas)
        self.costly = costly
        self.lean = lean
        self.committed = frozenset(fossils)
        blended = [slot for slot in self.on if slot not in self.committed]
        coalitions = [self.all_on]
        # Of one blended seed, all on without it is the committed configuration, which leaves room for all off.
        if not lean or len(blended) < 2 or not self.committed:
            coalitions.append(ALL_OFF)
        coalitions.append(self.committed)
        coalitions += [self.all_on - {slot} for slot in (blended if lean else self.on)]
        self._add_coalitions(coalitions, sites, alphas)
        for site in sites:
            if site.incubating:
                self._add(site.name, sites, {**alphas, site.name: site.target})
        if costly:
            self._add_coalitions(combinations(self.on, 1), sites, alphas)
            if len(self.on) in PAIRED_SEEDS:
                self._add_coalitions(combinations(self.on, 2), sites, alphas)
        return self.configurations

    def _add_coalitions(
        self,
        coalitions: Iterable[Iterable[str]],
        sites: list[Site],
        alphas: Mapping[str, float],
    ) -> None:
        for slots in map(frozenset, coalitions):
            self._add(slots, sites, {slot: alphas[slot] for slot in slots})

    def _add(self, name: Coalition | str, sites: list[Site], alphas: Mapping[str, float]) -> None:
        """Gives the configuration with these alphas, and all others 0, a name; equal ones share a row."""
        configuration = tuple(alphas.get(site.name, 0.0) for site in sites)
        if configuration not in self.configurations:
            self.configurations.append(configuration)
        self.row_of[name] = self.configurations.index(configuration)

    def record(self, correct: NDArray[Any], loss: NDArray[np.float64], counts: NDArray[np.float64]) -> None:
        """Stores the results of a plan of K configurations on n samples.

        ``correct`` [K, n] is the number of correct targets in each sample, out of ``counts`` [n]; ``loss`` [K] is the
        mean loss.
        """
        self.correct = correct.astype(np.float64)
        self.counts = counts
        self.loss = loss
        self.accuracies = (100.0 * self.correct.sum(axis=1) / counts.sum()).tolist()

    def measured(self, name: Coalition | str) -> bool:
        """True if a configuration is part of the plan."""
        return name in self.row_of

    def accuracy(self, name: Coalition | str) -> float:
        """Returns the accuracy of a configuration, pp."""
        return self.accuracies[self.row_of[name]]

    def loss_of(self, name: Coalition | str) -> float:
        return float(self.loss[self.row_of[name]])

    def difference(self, with_it: Coalition | str, without_it: Coalition | str) -> Paired:
        """Returns the paired accuracy difference of two configurations, pp."""
        correct_with = self.correct[self.row_of[with_it]]
        correct_without = self.correct[self.row_of[without_it]]
        with np.errstate(invalid="ignore"):  # infinite scores of a network that has diverged
            return paired(correct_with - correct_without, self.counts)

    def contribution(self, slot: str) -> Paired | None:
        """Returns the accuracy that a blended seed or a fossil adds to everything else, pp.

        None for any other seed, and if the plan does not tell.
        """
        rest = self.all_on - {slot}
        if slot not in self.on or not self.measured(rest):
            return None
        return self.difference(self.all_on, rest)

    def trial_of(self, slot: str) -> Paired | None:
        """Returns the accuracy that an incubating seed would add at its target alpha, pp; None without one."""
        if not self.measured(slot):
            return None
        return self.difference(slot, self.all_on)

    def shapley(self) -> dict[str, Paired]:
        """Returns the exact Shapley values of the seeds that are on, pp; empty unless every coalition was measured."""
        if len(self.on) > EXACT_UP_TO:
            return {}
        correct = {}
        for coalition in coalitions(self.on):
            if not self.measured(coalition):
                return {}
            correct[coalition] = self.correct[self.row_of[coalition]]
        return exact(self.on, correct, self.counts)

    def by_class(self, labels: NDArray[np.int64], classes: int) -> tuple[float, ...]:
        """Returns the accuracy of the committed network on samples with each of ``labels`` [n], pp; NaN without any."""
        right = np.bincount(labels, self.correct[self.row_of[self.committed]], classes)
        count = np.bincount(labels, minlength=classes)
        with np.errstate(invalid="ignore"):  # classes without samples
            points = 100.0 * right / count
        return tuple(points.tolist())

    def interaction(self, slot: str) -> float | None:
        """Σ over other slots j that are on of acc{i,j} − acc{i} − acc{j} + acc{}, pp; None unless all were measured.

        Two seeds are measured alone in every plan, as each other's absence; their interaction still is a costly one.
        """
        if slot not in self.on or (len(self.on) > 1 and not self.costly):
            return None
        total = 0.0
        for other in self.on:
            if other == slot:
                continue
            needed = [
                frozenset((slot, other)),
                frozenset((slot,)),
                frozenset((other,)),
                ALL_OFF,
            ]
            if not all(map(self.measured, needed)):
                return None
            joint, mine, its, none = map(self.accuracy, needed)
            total += joint - mine - its + none
        return total
