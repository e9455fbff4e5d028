"""The layers of simulated hosts, which take up seeds and give them up again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from esper.core.slots import Bools, Floats, Ints
from esper.core.state import Choices
from esper.env.backend import Merge, Release
from esper.env.planted_law import SimParams

MATURE = 1 - 1e-12
"""Max maturity of a seed that leaves its layers: that of 1 would take forever."""


class MergedSeed(NamedTuple):
    """A seed that is a part of its host's layers."""

    blueprint: int
    parameters: int
    flops: float
    worth: float
    """In pp."""


class PlantedLayers:
    """The merged seeds of hosts under a law, by env and slot, in order."""

    def __init__(self, law: SimParams, n_envs: int) -> None:
        self.law = law
        self.seeds: list[list[list[MergedSeed]]] = []
        """[E][S]."""
        for _ in range(n_envs):
            self.seeds.append([[] for _ in law.slots])

    def reset(self, env: int) -> None:
        for seeds in self.seeds[env]:
            seeds.clear()

    def merge(
        self,
        env: int,
        where: Bools,
        blueprint: Ints,
        parameters: Ints,
        flops: Floats,
        worth: Floats,
    ) -> Merge:
        """Takes up the seeds of a host in the slots of ``where``; all arrays are [S]."""
        for s in np.flatnonzero(where).tolist():
            seed = MergedSeed(
                int(blueprint[s]),
                int(parameters[s]),
                float(flops[s]),
                float(worth[s]),
            )
            self.seeds[env][s].append(seed)
        return Merge(
            where,
            where * parameters,
            where * flops,
            self.sizes(env),
        )

    def release(self, env: int, slot: int) -> tuple[Release, float]:
        """Gives up the last seed of a slot; returns it with its worth, pp."""
        seed = self.seeds[env][slot].pop()
        release = Release(
            slot=slot,
            blueprint=seed.blueprint,
            size=seed.parameters,
            parameters=seed.parameters,
            flops=seed.flops,
            now=self.sizes(env),
        )
        return release, seed.worth

    def sizes(self, env: int) -> Choices:
        """Returns the sizes of a host as it is."""
        choices = self.law.choices
        widths = choices.widths.copy()
        removable = choices.removable.copy()
        for s, seeds in enumerate(self.seeds[env]):
            added = sum(seed.parameters for seed in seeds)
            ratio = 1 + added / self.law.host_parameters
            widths[s] = np.rint(widths[s] * ratio)
            removable[s] = len(seeds)
        return replace(
            choices,
            widths=widths,
            removable=removable,
        )

    def state(self) -> list[Any]:
        """Returns the seeds as lists of plain values."""
        return [[list(map(list, seeds)) for seeds in slots] for slots in self.seeds]

    def load_state(self, state: list[Any]) -> None:
        for env, slots in enumerate(state):
            for s, seeds in enumerate(slots):
                self.seeds[env][s] = [MergedSeed(*seed) for seed in seeds]
