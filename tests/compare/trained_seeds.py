"""Differences of arms that were trained with several seeds."""

from __future__ import annotations

import numpy as np

from esper.compare.statistics import Floats


def trained(
    seeds: int, hosts: int, gain: float, spread: float, noise: float, seed: int = 0
) -> Floats:
    """Differences of ``hosts`` hosts for each of ``seeds`` trainings, whose own gains have a standard deviation."""
    rng = np.random.default_rng(seed)
    return (
        gain + rng.normal(0, spread, (seeds, 1)) + rng.normal(0, noise, (seeds, hosts))
    ).ravel()
