"""Parts of a vector env's info dict, which holds arrays [E, ...] and dicts: that of one env, and of ended episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
            part[key] = value[env].copy() if isinstance(value[env], np.ndarray) else value[env].item()
    return part


def final_entries(observation: NDArray[np.float32], info: Info, ended: NDArray[np.bool_]) -> Info:
    """Returns the info entries that Gymnasium's vector envs add in a step in which ``ended`` (bool [E]) episodes reset.

    ``final_obs`` is an object array [E] of observations, None for episodes that continue. ``final_info`` is ``info`` of
    the ended episodes, zero elsewhere; it and every dict in it have a bool array ``_key`` for each key, which marks the
    envs whose values are valid.
    """
    last = np.full(len(ended), None, dtype=object)
    for env in np.flatnonzero(ended):
        last[env] = observation[env].copy()
    final_info = _where(ended, info)
    return {"final_obs": last, "_final_obs": ended.copy(), "final_info": final_info, "_final_info": ended.copy()}


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
