"""Who owns which random numbers: everything is derived from (run seed, env, episode, purpose)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What a stream of random numbers is for; streams of different purposes are independent."""

    HOST = 1
    DATA = 2
    SEED = 3
    POLICY = 4
    NOISE = 5


def derive_seed(run_seed: int, env: int, episode: int, purpose: Purpose, *counters: int) -> int:
    """A 64-bit seed for one stream; ``counters`` separate streams further (a step, a germination)."""
    sequence = np.random.SeedSequence([run_seed, env, episode, int(purpose), *counters])
    return int(sequence.generate_state(1, np.uint64)[0])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run with torch's global CPU generator at ``seed`` and put it back afterwards.

    Modules draw their initial values from the global generator; this makes the draw belong to its env. Modules are made
    on the thread that owns the env, never inside a lane.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
