"""Parts of a vector env's info dict, which holds arrays [E, ...] and dicts: that of one env, and of ended episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from esper.spaces.arrays import Bools, Float32s

Info = dict[str, Any]


def of_env(info: Info, env: int) -> Info:
    """Returns one env's part of ``info``, with Python scalars and copies of arrays.

    It omits keys that start with ``_``, which mark the envs for which other keys are valid.
    """
    part: Info = {}
    for key, value in info.items():
        if isinstance(value, dict):
            part[key] = of_env(value, env)
        elif not key.startswith("_"):
            entry = value[env]
            part[key] = entry.copy() if isinstance(entry, np.ndarray) else entry.item()
    return part


def final_entries(
    observation: Float32s,
    info: Info,
    ended: Bools,
) -> Info:
    """Returns the info entries that Gymnasium's vector envs add in a step in which ``ended`` (bool [E]) episodes reset.

    ``final_obs`` is an object array [E] of observations, None for episodes that continue. ``final_info`` is ``info`` of
    the ended episodes, zero elsewhere; it and every dict in it have a bool array ``_key`` for each key, which marks the
    envs whose values are valid.
    """
    last = np.full(len(ended), None, dtype=object)
    for env in np.flatnonzero(ended):
        last[env] = observation[env].copy()
    return {
        "final_obs": last,
        "_final_obs": ended.copy(),
        "final_info": _where(ended, info),
        "_final_info": ended.copy(),
    }


def _where(ended: Bools, info: Info) -> Info:
    part: Info = {}
    for key, value in info.items():
        if isinstance(value, dict):
            part[key] = _where(ended, value)
        else:
            final = np.zeros_like(value)
            final[ended] = value[ended]
            part[key] = final
        part[f"_{key}"] = ended.copy()
    return part
