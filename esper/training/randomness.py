"""Who owns which random numbers: everything is derived from (run seed, env, episode, purpose)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor, nn

from esper.data.draws import GLOBAL_GENERATORS
from esper.training.shadow import ShadowBuffers


class Purpose(IntEnum):
    """What a stream of random numbers is for; streams of different purposes are independent."""

    HOST = 1
    DATA = 2
    SEED = 3
    POLICY = 4
    DROPOUT = 5
    NOISE = 6
    GLOBAL = 7
    AUGMENTATION = 8


def derive_seed(run_seed: int, env: int, episode: int, purpose: Purpose, *counters: int) -> int:
    """A 64-bit seed for one stream; ``counters`` separate streams further (a step, a germination)."""
    sequence = np.random.SeedSequence([run_seed, env, episode, int(purpose), *counters])
    return int(sequence.generate_state(1, np.uint64)[0])


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Run with torch's global generators, the CPU's and that of ``device``, at ``seed`` and put them back afterwards.

    Modules draw their initial values from these; this makes the draw belong to its env. The process has one of each,
    so runs in several threads take turns. Inside a lane it is used only for networks that cannot do without.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with GLOBAL_GENERATORS, torch.random.fork_rng(devices=devices):
        # torch.manual_seed would seed all GPUs, and nobody would put those back.
        torch.default_generator.manual_seed(seed)
        for gpu in devices:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


class Draws:
    """Where the dropout of one network draws from; a pass that must not disturb it draws from elsewhere."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    @contextmanager
    def using(self, generator: torch.Generator) -> Iterator[None]:
        own, self.generator = self.generator, generator
        try:
            yield
        finally:
            self.generator = own


class OwnedDropout(nn.Module):
    """Dropout that draws from a generator of its own instead of the process's.

    ``shared_dims`` are the last dimensions that are dropped together: 0 for single elements, 2 for whole channels of
    images [B, C, H, W].
    """

    def __init__(self, p: float, draws: Draws, shared_dims: int = 0) -> None:
        super().__init__()
        self.p = p
        self.draws = draws
        self.shared_dims = shared_dims

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = (*x.shape[: x.dim() - self.shared_dims], *(1,) * self.shared_dims)
        kept = torch.empty(shape, dtype=x.dtype, device=x.device)
        kept.bernoulli_(1 - self.p, generator=self.draws.generator)
        return x * kept / (1 - self.p) if self.p < 1 else x * kept


_DROPOUTS: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


def own_dropout(module: nn.Module, draws: Draws) -> None:
    """Replace the dropout layers below ``module``, so that lanes that run side by side do not share their numbers.

    One that is frozen, in eval mode in a module in train mode, stays as it is and drops nothing.
    """
    for name, child in module.named_children():
        if type(child) in _DROPOUTS and (child.training or not module.training):
            setattr(module, name, OwnedDropout(child.p, draws, _DROPOUTS[type(child)]))  # type: ignore[arg-type]
        else:
            own_dropout(child, draws)


def draws_globally(module: nn.Module, x: Tensor) -> bool:
    """Whether a training pass of ``module`` takes random numbers from the process's generators, as ``F.dropout`` does.

    Buffers are left as they were.
    """

    def state() -> list[Tensor]:
        gpu = [torch.cuda.get_rng_state(x.device)] if x.device.type == "cuda" else []
        return [torch.get_rng_state(), *gpu]

    training = module.training
    with seeded(0, x.device), torch.no_grad(), ShadowBuffers(module).in_place():
        before = state()
        module.train()(x)
        moved = any(not torch.equal(old, new) for old, new in zip(before, state(), strict=True))
    module.train(training)
    return moved
