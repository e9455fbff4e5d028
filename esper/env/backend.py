"""The hosts behind the phase loop, in training or simulated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from esper.core import transitions
from esper.core.slots import Bools, Floats, Ints, Slots
from esper.core.state import Choices, EnvState
from esper.training.counterfactual import Paired
from esper.training.governor import Panic

if TYPE_CHECKING:
    from esper.env.slot_env import SlotVectorEnv

Rollbacks = dict[int, tuple[Panic, int]]
"""Reason and restored epoch of each rollback, by env."""


@dataclass(frozen=True)
class FinalScores:
    """Results of the last validation of one host beside its score."""

    shapley: Mapping[str, Paired]
    """Shapley values of its seeds by slot, pp; {} unless all coalitions were measured."""
    by_class: tuple[float, ...] = ()
    """Accuracy of the committed network on each class, pp, see ``EpisodeCompleted.class_accuracy``."""


@dataclass(frozen=True)
class Merge:
    """The gains of a host by seeds that became a part of its layers."""

    slots: Bools
    """The slots of these seeds, [S]."""
    parameters: Ints
    """Number of parameters that the host gained by each, [S]."""
    flops: Floats
    """Operations of a forward pass, a sample, that it gained by each, [S]."""
    now: Choices
    """Sizes of the host as it is, and of the seeds that could be planted in it."""


@dataclass(frozen=True)
class Release:
    """The units that one host's layers have given up, as a seed beside them."""

    slot: int
    """Index of the slot."""
    blueprint: int
    """Index of the seed's blueprint."""
    size: int
    """Number of parameters of the seed."""
    parameters: int
    """Number of parameters that the layers have lost."""
    flops: float
    """Operations of a forward pass, a sample, that they have lost."""
    now: Choices
    """Sizes of the host as it is, and of the seeds that could be planted in it."""


def sizes_now(hosts: Any) -> list[Choices]:
    """Returns the sizes of each host as it is, and of the seeds that could be planted in it."""
    return [host.merger.choices_of(host.training) for host in hosts.hosts]


class Backend(ABC):
    """E hosts with S slots. ``active`` bool [E] are the hosts that take part; ``state`` is changed in place.

    The defaults are for hosts that never go bad, have no modules to remove, are not compared, and are not copied.
    """

    only_added: Bools = np.zeros(1, dtype=np.bool_)
    """Blueprints whose seeds are added whatever the blend style, [B]."""

    at_once: Bools = np.zeros(1, dtype=np.bool_)
    """Blueprints whose seeds are a part of their host at once, [B]."""

    @abstractmethod
    def reset(
        self,
        starting: Bools,
        run_seed: int,
        episodes: Ints,
    ) -> None:
        """Makes new hosts for these episodes [E], in the envs of ``starting`` bool [E]."""

    @abstractmethod
    def plant(
        self,
        where: Bools,
        blueprint: Ints,
        style: Ints,
    ) -> tuple[Ints, dict[int, str]]:
        """Plants a seed in each slot of ``where`` bool [E, S]; ``blueprint`` and ``style`` are indices [E, 1].

        Returns the number of parameters of each seed, [E, 1], and by env why a seed could not be planted.
        """

    def remove(self, where: Bools) -> None:  # noqa: B027
        """Removes the seeds of these slots, bool [E, S], which the lifecycle has pruned."""

    @abstractmethod
    def train(
        self,
        active: Bools,
        state: EnvState,
    ) -> None:
        """Trains one epoch with the roles and alphas that follow from ``state``."""

    @abstractmethod
    def measure(
        self,
        active: Bools,
        state: EnvState,
    ) -> None:
        """Validates and writes the results into ``state``."""

    def take_first_snapshots(self, starting: Bools, state: EnvState) -> None:  # noqa: B027
        """Starts to govern hosts, after their first validation."""

    def govern(
        self,
        active: Bools,
        state: EnvState,
    ) -> Rollbacks:
        """Rolls bad hosts back and cuts broken seeds; returns the rollbacks."""
        return {}

    def merge(
        self,
        due: Bools,
        state: EnvState,
    ) -> dict[int, Merge]:
        """Makes fossils in the slots of ``due`` bool [E, S] a part of their hosts' layers, if they can become that.

        Returns what was merged, by env; ``state`` stays as it is.
        """
        return {}

    def rebase(self, where: Bools, state: EnvState) -> None:  # noqa: B027
        """Makes the present hosts of ``where`` bool [E] those that a rollback restores, after a merge."""

    def take_out(self, where: Bools) -> dict[int, Release]:
        """Takes the units of the last merge in each slot of ``where`` bool [E, S], at most one of an env, out of the
        layers of its host, and plants them there as a seed. Returns what was taken, by env."""
        return {}

    def final_scores(self, env: int) -> FinalScores:
        """Returns what the last validation of an env has measured, for the report of its episode."""
        return FinalScores({})

    @abstractmethod
    def test_accuracy(self, state: EnvState) -> Floats:
        """Returns the test accuracy of each committed network (fossils only), pp [E]."""

    def map_hosts(self, function: Callable[[Any], list[Any]]) -> list[Any]:
        """Returns the results of ``function`` for each host in training; [] if hosts are simulated.

        It is a function of a module: one that is called with the ``TrainingBackend`` of each rank, and returns a list
        of what can be pickled, with an entry for each of its hosts, or [].
        """
        return []

    @abstractmethod
    def state_dict(self) -> Any:
        """Returns the state of the hosts for a resume, beside that of the envs."""

    @abstractmethod
    def load_state_dict(self, saved: Any, state: EnvState) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Ends threads and frees what the hosts hold."""


def merge_kept(env: SlotVectorEnv) -> None:
    """Makes kept seeds a part of their hosts, whose seeds then have other sizes."""
    for row, merged in env.loop.merge().items():
        env.offers.put(row, merged.now)


def follow_layers(env: SlotVectorEnv) -> None:
    """Follows layers that have grown before an epoch or shrunk by actions, or that a rollback has made as they were."""
    for row, merged in env.loop.joined.items():
        env.offers.put(row, merged.now)
    env.loop.joined = {}
    for row, release in env.loop.released.items():
        env.offers.put(row, release.now)
    env.loop.released = {}
    slots = env.state.slots
    if (env.state.rolled_back & env.state.trained & slots.merges.any(axis=1)).any():
        look_at_layers(env)


def look_at_layers(env: SlotVectorEnv) -> None:
    """Takes over what all hosts have grown in their layers."""
    for row, now in enumerate(env.backend.map_hosts(sizes_now)):
        env.offers.put(row, now)


def take_out(
    backend: Backend,
    slots: Slots,
    where: Bools,
) -> dict[int, Release]:
    """Takes units out of layers, in the slots of ``where`` [E, S]; they become seeds that PRUNE is to remove."""
    if not where.any():
        return {}
    blueprint = np.zeros_like(slots.blueprint)
    sizes = np.zeros_like(slots.parameters)
    parameters = np.zeros_like(slots.parameters)
    flops = np.zeros_like(slots.merged_flops)
    released = backend.take_out(where)
    for row, release in released.items():
        blueprint[row] = release.blueprint
        sizes[row] = release.size
        parameters[row] = release.parameters
        flops[row] = release.flops
    transitions.release(
        slots,
        where,
        blueprint,
        sizes,
        parameters,
        flops,
    )
    return released
