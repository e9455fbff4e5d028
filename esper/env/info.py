"""The info dict of a vector env, which holds arrays [E, ...] and dicts of them: one env's part, and ended episodes'."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Info = dict[str, Any]


def of_env(info: Info, env: int) -> Info:
    """What ``info`` says of one env: scalars as Python's, arrays as copies. Keys that start with ``_``, which say for
    which envs the others are meant, have no place in it."""
    part: Info = {}
    for key, value in info.items():
        if key.startswith("_"):
            continue
        if isinstance(value, dict):
            part[key] = of_env(value, env)
        else:
            entry = value[env]
            part[key] = entry.copy() if isinstance(entry, np.ndarray) else entry.item()
    return part


def final_entries(observation: NDArray[np.float32], info: Info, ended: NDArray[np.bool_]) -> Info:
    """What Gymnasium's vector envs add to the info of a step in which the episodes of ``ended`` (bool [E]) ended and
    were reset.

    ``final_obs`` is an object array [E] of observations, None where the episode goes on. ``final_info`` is ``info`` of
    the ended ones, zero elsewhere, and like every dict in it has for each key another one, ``_key``, that says where
    its values mean something.
    """
    observations = np.full(len(ended), None, dtype=object)
    for env in np.flatnonzero(ended):
        observations[env] = observation[env].copy()
    return {
        "final_obs": observations,
        "_final_obs": ended.copy(),
        "final_info": _where(ended, info),
        "_final_info": ended.copy(),
    }


def _where(ended: NDArray[np.bool_], info: Info) -> Info:
    part: Info = {}
    for key, value in info.items():
        if isinstance(value, dict):
            part[key] = _where(ended, value)
        else:
            part[key] = np.zeros_like(value)
            part[key][ended] = value[ended]
        part[f"_{key}"] = ended.copy()
    return part
