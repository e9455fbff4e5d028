"""The hosts behind the phase loop, in training or simulated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.core.slots import Bools, Floats, Ints
from esper.core.state import Choices, EnvState
from esper.training.counterfactual import Paired
from esper.training.governor import Panic

Rollbacks = dict[int, tuple[Panic, int]]
"""Reason and restored epoch of each rollback, by env."""


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
    def train(self, active: Bools, state: EnvState) -> None:
        """Trains one epoch with the roles and alphas that follow from ``state``."""

    @abstractmethod
    def measure(self, active: Bools, state: EnvState) -> None:
        """Validates and writes the results into ``state``."""

    def take_first_snapshots(self, starting: Bools, state: EnvState) -> None:  # noqa: B027
        """Starts to govern hosts, after their first validation."""

    def govern(self, active: Bools, state: EnvState) -> Rollbacks:
        """Rolls bad hosts back and cuts broken seeds; returns the rollbacks."""
        return {}

    def merge(self, due: Bools, state: EnvState) -> dict[int, Merge]:
        """Makes fossils in the slots of ``due`` bool [E, S] a part of their hosts' layers, if they can become that.

        Returns what was merged, by env; ``state`` stays as it is.
        """
        return {}

    def shapley(self, env: int) -> Mapping[str, Paired]:
        """Returns the Shapley values of an env's seeds by slot, pp, of its last validation; {} unless all are known."""
        return {}

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
