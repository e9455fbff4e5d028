"""Ownership of random numbers: every stream is derived from (run seed, env, episode, purpose)."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from reprlib import repr as short

import numpy as np
import torch
from torch import Tensor, nn

from esper.core.blend import Seed
from esper.data.rng import GLOBAL_GENERATORS
from esper.hosts.host import kept_modes
from esper.training.shadow import ShadowBuffers

HELD_OUT = 2**31
"""Added to a run's seed for its held-out hosts, which no agent learns from."""


def is_held_out(run_seed: int) -> bool:
    """Whether hosts of this seed are held out."""
    return run_seed >= HELD_OUT


class RngStream(IntEnum):
    """Purpose of a random stream; streams with different purposes are independent."""

    HOST = 1
    DATA = 2
    SEED = 3
    DROPOUT = 5
    NOISE = 6
    GLOBAL = 7
    AUGMENTATION = 8
    NEED = 10
    CONTEXT = 11


def derive_seed(
    run_seed: int,
    env: int,
    episode: int,
    purpose: RngStream,
    *counters: int,
) -> int:
    """Derives the 64-bit seed of one stream; ``counters`` separate streams further (a step, a germination)."""
    sequence = np.random.SeedSequence([run_seed, env, episode, int(purpose), *counters])
    return int(sequence.generate_state(1, np.uint64)[0])


def accepted_seed(seed: object) -> int | None:
    """Returns a seed, which may be an integer of NumPy's, as an int. Raises ValueError for any other value."""
    if seed is None:
        return None
    if isinstance(seed, list | tuple):
        raise ValueError(
            f"this env takes one run seed, from which its envs derive their own, not seed={short(seed)}; pass an int"
        )
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"the seed must be an integer of 0 or more, not {short(seed)}") from None
    if number < 0:
        raise ValueError(f"the seed must be an integer of 0 or more, not {short(seed)}")
    return number


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seeds torch's global generators (the CPU's and ``device``'s) for a block and restores them afterwards.

    Modules draw their initial values from these. The generators are process-wide, so a lock serialises blocks in
    several threads. Hosts use it only for networks that draw from them.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with GLOBAL_GENERATORS, torch.random.fork_rng(devices=devices):
        # torch.manual_seed would seed all GPUs, which would not be restored.
        torch.default_generator.manual_seed(seed)
        for gpu in devices:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


@dataclass
class RngHandle:
    """Holds the generator of one network's dropout; a pass that must not advance it replaces it for a while."""

    generator: torch.Generator


class OwnedDropout(nn.Module):
    """Dropout that draws from its own generator instead of the process's.

    ``shared_dims`` is the number of last dimensions that are dropped together: 0 for single elements, 2 for whole
    channels of images [B, C, H, W].
    """

    def __init__(self, p: float, draws: RngHandle, shared_dims: int = 0) -> None:
        super().__init__()
        self.p = p
        self.draws = draws
        self.shared_dims = shared_dims

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        # The mask has size 1 in the dimensions that are dropped together.
        separate = x.dim() - self.shared_dims
        shape = (*x.shape[:separate], *(1,) * self.shared_dims)
        mask = torch.empty(shape, dtype=x.dtype, device=x.device)
        mask.bernoulli_(1 - self.p, generator=self.draws.generator)
        if self.p < 1:
            return x * mask / (1 - self.p)
        return x * mask  # all zero


_DROPOUTS: dict[type[nn.Module], int] = {
    nn.Dropout: 0,
    nn.Dropout1d: 1,
    nn.Dropout2d: 2,
    nn.Dropout3d: 3,
}


def own_dropout(module: nn.Module, draws: RngHandle) -> None:
    """Replaces the dropout layers below ``module``, so that concurrent passes do not share random numbers.

    Copies of replaced ones draw from ``draws``, too. A frozen layer (in eval mode inside a module in train mode) stays
    and drops nothing.
    """
    for name, child in module.named_children():
        shared_dims = _DROPOUTS.get(type(child))
        if shared_dims is not None and (child.training or not module.training):
            setattr(module, name, OwnedDropout(child.p, draws, shared_dims))  # type: ignore[arg-type]
        elif isinstance(child, OwnedDropout):
            child.draws = draws
        else:
            own_dropout(child, draws)


def has_dropout(module: nn.Module) -> bool:
    """Whether training passes of ``module`` draw from owned generators."""
    return any(isinstance(layer, OwnedDropout) and layer.p > 0 for layer in module.modules())


def draws_globally(module: nn.Module, x: Tensor) -> bool:
    """Tries whether a training pass on inputs ``x`` draws from the process's generators, as ``F.dropout`` does.

    Buffers and the mode do not change.
    """

    def state() -> list[Tensor]:
        states = [torch.get_rng_state()]
        if x.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(x.device))
        return states

    with kept_modes(module), seeded(0, x.device), torch.no_grad(), ShadowBuffers(module).in_place():
        before = state()
        module.train()
        module(x)
        return not all(map(torch.equal, before, state()))


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
        self._gpus = [probe.device] if probe.device.type == "cuda" else []
        self.needed = draws_globally(seed, probe)
        self._states: dict[str, Tensor] = {}
        if self.needed:
            with seeded(number, probe.device):
                self._save()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Runs a block with the seed's own random numbers, which go on from block to block."""
        if not self.needed:
            yield
            return
        with torch.random.fork_rng(devices=self._gpus):
            torch.set_rng_state(self._states["cpu"])
            for gpu in self._gpus:
                torch.cuda.set_rng_state(self._states["gpu"], gpu)
            yield
            self._save()

    def _save(self) -> None:
        self._states["cpu"] = torch.get_rng_state()
        for gpu in self._gpus:
            self._states["gpu"] = torch.cuda.get_rng_state(gpu)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._states)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._states = dict(state)
