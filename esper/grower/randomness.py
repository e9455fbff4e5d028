"""Random numbers of a user's loop: growth draws none of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from esper.seeds.blend import Seed
from esper.training.rng import draws_globally


@contextmanager
def kept_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restores the global generators of torch (the CPU's and those of GPUs), NumPy and Python after a block."""
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002  a loop may draw from it
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


class SeedDraws:
    """The random numbers of a seed that learns beside the model, such as those of dropout.

    Args:
        seed: the seed.
        probe: features to try whether it draws any.
        number: seeds its generator.
    """

    def __init__(
        self,
        seed: Seed,
        probe: Tensor,
        number: int,
    ) -> None:
        self.device = probe.device
        self.needed = draws_globally(seed, probe)
        self._states = self._seeded(number) if self.needed else {}

    def own(self) -> AbstractContextManager[None]:
        """Runs a block with the seed's own random numbers, which go on from block to block."""
        if not self.needed:
            return nullcontext()
        return self._swapped()

    @property
    def _gpus(self) -> list[torch.device]:
        if self.device.type != "cuda":
            return []
        return [self.device]

    def _seeded(self, number: int) -> dict[str, Tensor]:
        """Returns the first states of the generators."""
        states = {"cpu": torch.Generator().manual_seed(number).get_state()}
        for gpu in self._gpus:
            states["gpu"] = torch.Generator(gpu).manual_seed(number).get_state()
        return states

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self._gpus):
            torch.set_rng_state(self._states["cpu"])
            for gpu in self._gpus:
                torch.cuda.set_rng_state(self._states["gpu"], gpu)
            yield
            self._states["cpu"] = torch.get_rng_state()
            for gpu in self._gpus:
                self._states["gpu"] = torch.cuda.get_rng_state(gpu)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._states)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._states = dict(state)
