"""Counter-based random numbers for actions: an env's draws depend only on its own counters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]


def _mix(x: UInt64s) -> UInt64s:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): an input bit flips half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def counter_uniforms(
    run_seed: int, env: NDArray[np.int64], episode: NDArray[np.int64], step: NDArray[np.int64], draws: int
) -> NDArray[np.float64]:
    """Returns uniform numbers in [0, 1), float64 [E, draws], keyed by (run seed, env, episode, step, draw).

    ``env``, ``episode`` and ``step`` are int64 [E].
    """
    with np.errstate(over="ignore"):
        golden = np.uint64(0x9E3779B97F4A7C15)
        key = _mix(np.full(len(env), run_seed, dtype=np.uint64) + golden)
        for counter in (env, episode, step):
            key = _mix(key * golden + counter.astype(np.uint64) + np.uint64(1))
        values = _mix(key[:, None] + golden * (np.arange(draws, dtype=np.uint64) + np.uint64(1)))
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53
