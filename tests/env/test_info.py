"""Info dicts of a vector env: the part of one env, and the entries of ended episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from esper.env.single import of_env
from esper.env.slot_env import final_entries


@pytest.fixture
def info() -> dict[str, Any]:
    return {
        "accuracy": np.array([1.5, 2.5, 3.5]),
        "_accuracy": np.array([True, True, True]),
        "idle": np.array([True, False, False]),
        "mask": {"op": np.arange(6).reshape(3, 2), "_op": np.array([True, True, True])},
    }


def test_the_part_of_one_env_has_scalars_and_copies(info: dict[str, Any]) -> None:
    part = of_env(info, 1)
    assert set(part) == {"accuracy", "idle", "mask"}
    assert (type(part["accuracy"]), part["accuracy"]) == (float, 2.5)
    assert part["idle"] is False
    assert set(part["mask"]) == {"op"}
    part["mask"]["op"][:] = 9
    assert info["mask"]["op"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_final_entries_are_those_of_ended_episodes(info: dict[str, Any]) -> None:
    del info["_accuracy"], info["mask"]["_op"]
    observation = np.arange(6, dtype=np.float32).reshape(3, 2)
    ended = np.array([False, True, True])
    found = final_entries(observation, info, ended)
    assert found["final_obs"][0] is None
    assert found["final_obs"][1].tolist() == [2, 3]
    assert found["final_info"]["accuracy"].tolist() == [0, 2.5, 3.5]
    assert found["final_info"]["mask"]["op"].tolist() == [[0, 0], [2, 3], [4, 5]]
    for valid in (
        found["_final_obs"],
        found["final_info"]["_accuracy"],
        found["final_info"]["mask"]["_op"],
    ):
        assert valid.tolist() == [False, True, True]


def test_final_entries_do_not_change_with_the_next_step(info: dict[str, Any]) -> None:
    del info["_accuracy"], info["mask"]["_op"]
    observation, ended = np.ones((3, 2), np.float32), np.array([True, True, False])
    found = final_entries(observation, info, ended)
    observation[:], ended[:], info["accuracy"][:] = 0, False, 0
    assert found["final_obs"][0].tolist() == [1, 1]
    assert found["_final_info"].tolist() == [True, True, False]
    assert found["final_info"]["accuracy"].tolist() == [1.5, 2.5, 0]
