"""Parts of a vector env's info dict, which holds arrays [E, ...] and dicts: that of one env, and of ended episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from esper.env.slot_env import SlotVectorEnv

Info = dict[str, Any]


def step_info(env: SlotVectorEnv) -> Info:
    """Returns the info dict of a vector env's present state; copies, because the env itself uses these arrays."""
    assert env.rules is not None
    return {
        "action_mask": {name: mask.copy() for name, mask in env.mask.heads(env.action_spec).items()},
        "reward_terms": {name: term.copy() for name, term in env.reward_terms.items()},
        "illegal_actions": env.illegal_actions.copy(),
        "idle": env.done.copy(),
        "validation_accuracy": env.state.accuracy.copy(),
        "committed_accuracy": env.state.committed.copy(),
        "baseline_accuracy": env.rules.baseline_at(env.state.epoch),
    }


def of_env(info: Info, env: int) -> Info:
    """Returns one env's part of ``info``, with Python scalars and copies of arrays.

    It omits keys that start with ``_``, which mark the envs for which other keys are valid.
    """
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
    """Returns the info entries that Gymnasium's vector envs add in a step in which ``ended`` (bool [E]) episodes reset.

    ``final_obs`` is an object array [E] of observations, None for episodes that continue. ``final_info`` is ``info`` of
    the ended episodes, zero elsewhere; it and every dict in it have a bool array ``_key`` for each key, which marks the
    envs whose values are valid.
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
