"""Counterfactual configurations of one host, and the contributions of seeds that follow from their results.

All statistics are paired: configurations are evaluated on the same samples, and differences are taken per sample.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.attribution import shapley
from esper.attribution.paired import Paired, paired
from esper.seeds.site import Site
from esper.training.validate import Configuration

ALL_ON = "all on"
ALL_OFF = "all off"
COMMITTED = "committed"

PAIRED_SEEDS = (3, 4)
"""Numbers of seeds that are on at which pairs are measured: a pair of two is all on; more make too many."""
MAX_PAIRS = math.comb(max(PAIRED_SEEDS), 2)


def max_configurations(slots: int) -> int:
    """Max configurations of a plan: three fixed ones, each slot off, each alone or on trial, and the pairs."""
    return 3 + 2 * slots + MAX_PAIRS


class CounterfactualHelper:
    """The configurations of one env's last validation and the result of each sample in each of them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Clears all plans and results, as at the start of an episode."""
        self.row_of: dict[str, int] = {}
        self.configurations: list[Configuration] = []
        self.on: list[str] = []
        """Slots of the seeds in the forward pass: blended ones and fossils."""
        self.correct: NDArray[np.float64] = np.zeros((0, 0))
        self.counts: NDArray[np.float64] = np.zeros(0)
        self.loss: NDArray[np.float64] = np.zeros(0)

    def plan(self, sites: list[Site], costly: bool) -> list[Configuration]:
        """Returns the distinct configurations to evaluate for ``sites`` (execution order); forgets earlier results.

        They are all on (blended seeds and fossils), all off, committed, all on without each one, and each incubating
        seed on trial at its target alpha. ``costly`` adds each alone, and pairs if 3 or 4 are on.
        """
        self.reset()
        current = [site.alpha if site.on else 0.0 for site in sites]
        on = [place for place, site in enumerate(sites) if site.on]
        self.on = [sites[place].name for place in on]

        def only(kept: tuple[int, ...]) -> Configuration:
            return tuple(alpha if place in kept else 0.0 for place, alpha in enumerate(current))

        self._add(ALL_ON, tuple(current))
        self._add(ALL_OFF, only(()))
        self._add(COMMITTED, only(tuple(place for place in on if sites[place].fossil)))
        for place in on:
            self._add(off(sites[place].name), only(tuple(other for other in on if other != place)))
        for place, site in enumerate(sites):
            if site.incubating:
                self._add(trial(site.name), (*current[:place], site.target, *current[place + 1 :]))
        if costly:
            for place in on:
                self._add(alone(sites[place].name), only((place,)))
            if len(on) in PAIRED_SEEDS:
                for pair in combinations(on, 2):
                    self._add(both(*(sites[place].name for place in pair)), only(pair))
        return self.configurations

    def _add(self, name: str, configuration: Configuration) -> None:
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

    def accuracy(self, name: str) -> float:
        """Returns the accuracy of a configuration, pp."""
        return 100.0 * float(self.correct[self.row_of[name]].sum()) / float(self.counts.sum())

    def loss_of(self, name: str) -> float:
        return float(self.loss[self.row_of[name]])

    def difference(self, with_it: str, without_it: str) -> Paired:
        """Returns the paired accuracy difference of two configurations, pp."""
        with np.errstate(invalid="ignore"):  # infinite scores of a network that has diverged
            return paired(self.correct[self.row_of[with_it]] - self.correct[self.row_of[without_it]], self.counts)

    def contribution(self, slot: str) -> Paired | None:
        """Returns the accuracy that a blended seed or a fossil adds to everything else, pp; None for any other."""
        return self.difference(ALL_ON, off(slot)) if off(slot) in self.row_of else None

    def shapley(self) -> dict[str, Paired]:
        """Returns the exact Shapley values of the seeds that are on, pp; empty unless every coalition was measured."""
        if len(self.on) > shapley.EXACT_UP_TO:
            return {}
        named = {coalition: self._name_of(coalition) for coalition in shapley.coalitions(self.on)}
        if not self.row_of.keys() >= set(named.values()):
            return {}
        correct = {coalition: self.correct[self.row_of[name]] for coalition, name in named.items()}
        return shapley.exact(self.on, correct, self.counts)

    def _name_of(self, coalition: frozenset[str]) -> str:
        """Returns the name of the configuration with only these of at most four slots on."""
        absent = [slot for slot in self.on if slot not in coalition]
        if not absent or not coalition:
            return ALL_OFF if absent else ALL_ON
        if len(absent) == 1:
            return off(absent[0])
        return alone(*coalition) if len(coalition) == 1 else both(*coalition)

    def trial_of(self, slot: str) -> Paired | None:
        """Returns the accuracy that an incubating seed would add at its target alpha, pp; None without one."""
        return self.difference(trial(slot), ALL_ON) if trial(slot) in self.row_of else None

    def interaction(self, slot: str) -> float | None:
        """Σ over other slots j that are on of acc{i,j} − acc{i} − acc{j} + acc{}, pp; None unless all were measured."""
        if slot not in self.on:
            return None
        total = 0.0
        for other in (name for name in self.on if name != slot):
            pair = ALL_ON if len(self.on) == 2 else both(slot, other)
            needed = (pair, alone(slot), alone(other), ALL_OFF)
            if not self.row_of.keys() >= set(needed):
                return None
            joint, mine, its, none = (self.accuracy(name) for name in needed)
            total += joint - mine - its + none
        return total


def off(slot: str) -> str:
    """Name of the configuration with everything on except ``slot``."""
    return f"{slot} off"


def alone(slot: str) -> str:
    """Name of the configuration with only ``slot`` on."""
    return f"{slot} alone"


def both(first: str, second: str) -> str:
    """Name of the configuration with only these two slots on, in either order."""
    return " and ".join(sorted((first, second)))


def trial(slot: str) -> str:
    """Name of the configuration with the incubating seed in ``slot`` at its target alpha."""
    return f"{slot} on trial"
