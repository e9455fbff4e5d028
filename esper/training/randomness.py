"""Who owns which random numbers: everything is derived from (run seed, env, episode, purpose)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor, nn

_GLOBAL_GENERATOR = threading.RLock()


class Purpose(IntEnum):
    """What a stream of random numbers is for; streams of different purposes are independent."""

    HOST = 1
    DATA = 2
    SEED = 3
    POLICY = 4
    DROPOUT = 5
    NOISE = 6


def derive_seed(run_seed: int, env: int, episode: int, purpose: Purpose, *counters: int) -> int:
    """A 64-bit seed for one stream; ``counters`` separate streams further (a step, a germination)."""
    sequence = np.random.SeedSequence([run_seed, env, episode, int(purpose), *counters])
    return int(sequence.generate_state(1, np.uint64)[0])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run with torch's global CPU generator at ``seed`` and put it back afterwards.

    Modules draw their initial values from the global generator; this makes the draw belong to its env. The process has
    one such generator, so runs in several threads take turns. Never used inside a lane.
    """
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class OwnedDropout(nn.Module):
    """Dropout of single elements that draws from a generator of its own instead of the process's."""

    def __init__(self, p: float, generator: torch.Generator) -> None:
        super().__init__()
        self.p = p
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.generator)
        return x * kept / (1 - self.p) if self.p < 1 else x * kept


def own_dropout(module: nn.Module, generator: torch.Generator) -> None:
    """Replace every ``nn.Dropout`` below ``module``, so that lanes that run side by side do not share its numbers."""
    for name, child in module.named_children():
        if isinstance(child, nn.Dropout):
            setattr(module, name, OwnedDropout(child.p, generator))
        else:
            own_dropout(child, generator)
