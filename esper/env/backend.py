"""The protocol between the phases of an epoch and the hosts that they are about, in training or simulated."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from esper.env.state import EnvState
from esper.lifecycle.slots import Bools, Floats, Ints


class Backend(Protocol):
    """E hosts with S slots. ``active`` is bool [E]: the hosts that take part; the state of envs is changed in place."""

    host_parameters: int
    """Number of parameters of a host without seeds."""

    def reset(self, starting: Bools, run_seed: int, episodes: NDArray[np.int64]) -> None:
        """Makes new hosts for these episodes, int64 [E]."""
        ...

    def plant(self, where: Bools, blueprint: Ints, style: Ints) -> tuple[Ints, dict[int, str]]:
        """Plants a seed in each slot of ``where`` bool [E, S]; ``blueprint`` and ``style`` are indices [E, 1].

        Returns the number of parameters of each seed, [E, 1], and by env why a seed could not be planted.
        """
        ...

    def train(self, active: Bools, state: EnvState) -> None:
        """Trains one epoch with the roles and alphas that follow from ``state``."""
        ...

    def measure(self, active: Bools, state: EnvState) -> None:
        """Validates and writes the results into ``state``."""
        ...

    def begin(self, starting: Bools, state: EnvState) -> None:
        """Starts to watch hosts, after their first validation."""
        ...

    def govern(self, active: Bools, state: EnvState) -> Bools:
        """Rolls bad hosts back and removes broken seeds; returns the slots [E, S] whose seeds are gone."""
        ...

    def drop(self, where: Bools) -> None:
        """Removes the seeds of these slots, bool [E, S], which the lifecycle has pruned."""
        ...

    def test_accuracy(self, state: EnvState) -> Floats:
        """Returns the test accuracy of each committed network (fossils only), pp [E]."""
        ...

    def copies_held(self) -> list[Counter[str]]:
        """Bytes of the copies that are kept of each host, by where they lie: ``cpu``, ``cuda:0``, ... or ``pinned``."""
        ...

    def state_dict(self) -> Any:
        """Returns what a resume needs beside the state of envs."""
        ...

    def load_state_dict(self, saved: Any, state: EnvState) -> None: ...

    def close(self) -> None: ...
