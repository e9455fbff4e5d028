"""``esper/Growth-v0``: its registration in Gymnasium, its keywords, and imports without cost."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper.config import ConfigError, TrainingConfig
from esper.env.make import PLAIN, make_env, make_single, make_vector
from esper.env.planted import PlantedVectorEnv
from esper.env.single import SingleEnv
from esper.env.vector_env import GrowthVectorEnv
from tests.core_helpers import digits, tiny_config, wait_actions

ID = "esper/Growth-v0"
SMALL: dict[str, Any] = {
    "episode_length": 2,
    "baseline_episodes": 1,
    "samples_per_epoch": 64,
    "batch_size": 32,
}


def run_python(script: str, folder: Path) -> str:
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    ["import gymnasium, esper", "import esper, gymnasium, esper.env"],
)
def test_the_id_is_known_once_both_are_imported(first: str, tmp_path: Path) -> None:
    make = "print(gymnasium.make_vec({!r}, num_envs=2, task='planted'))"
    script = "\n".join([first, make.format(ID), make.format(f"esper:{ID}")])
    assert (
        run_python(script, tmp_path).splitlines()
        == [f"PlantedVectorEnv({ID}, num_envs=2)"] * 2
    )


def test_importing_esper_imports_no_library_and_changes_no_import(
    tmp_path: Path,
) -> None:
    script = """
import sys
before = list(sys.meta_path)
import esper
print(sorted({"torch", "numpy", "gymnasium"} & set(sys.modules)), sys.meta_path == before)
import esper.env
print(sorted({"torch"} & set(sys.modules)), "esper/Growth-v0" in sys.modules["gymnasium"].registry)
"""
    assert run_python(script, tmp_path).splitlines() == ["[] True", "[] True"]


def test_make_vec_makes_hosts_that_are_reset_in_the_same_step() -> None:
    env = gymnasium.make_vec(ID, num_envs=3, **SMALL)
    assert isinstance(env, GrowthVectorEnv)
    assert (env.num_envs, env.horizon, env.config.task.name) == (3, 2, "digits")
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    env.reset(seed=0)
    env.step(wait_actions(3))
    *_, terminated, _, info = env.step(wait_actions(3))
    assert terminated.all()
    assert info["_final_info"].all()
    env.close()


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, "Disabled"])
def test_make_vec_leaves_ended_envs_alone_if_asked(mode: Any) -> None:
    env = gymnasium.make_vec(ID, num_envs=2, task="planted", autoreset_mode=mode)
    assert isinstance(env, PlantedVectorEnv)
    assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED


def test_keywords_reach_the_config_and_override_it() -> None:
    config = TrainingConfig.parse(
        {"task": {"name": "planted"}, "env": {"max_seeds": 1}, "run": {"seed": 5}}
    )
    env = make_vector(
        2,
        config=config,
        episode_length=7,
        reward={"mode": "sparse"},
        env={"embargo": 3},
        min_prune_age=4,
    )
    assert env.config.task.name == "planted"
    assert env.config.env.min_prune_age == 4
    assert (
        env.config.env.max_seeds,
        env.config.env.embargo,
        env.horizon,
        env.num_envs,
    ) == (1, 3, 7, 2)
    assert (env.config.run.seed, env.config.reward.mode) == (5, "sparse")
    tables = make_vector(2, task="planted", config={"env": {"max_seeds": 1}}).config
    assert (tables.env.max_seeds, tables.env.n_envs) == (1, 2)
    assert set(PLAIN) >= {"episode_length", "batch_size", "auto_advance"}


def test_no_keyword_stands_for_two_fields() -> None:
    sections = TrainingConfig.model_fields
    both = set(sections["task"].annotation.model_fields) & set(
        sections["env"].annotation.model_fields
    )  # type: ignore[union-attr]
    assert not both
    assert not set(PLAIN) & set(sections)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        (
            {"episode_lenght": 3},
            TypeError,
            "unexpected keyword argument 'episode_lenght'; known: .*episode_length",
        ),
        ({"render_mode": "rgb_array"}, TypeError, "render_mode is None"),
        ({"reward": "sparse"}, TypeError, "reward must be a dict"),
        (
            {"reward": {"mod": "sparse"}},
            ConfigError,
            r"unknown key reward.mod \(did you mean 'mode'\?\); reward has: mode",
        ),
        (
            {"episode_length": 0},
            ConfigError,
            "env.episode_length: .*greater than or equal to 1",
        ),
        ({"task": "nope"}, ConfigError, "unknown task 'nope'"),
        (
            {"config": {"env": {"n_envs": 7}}},
            ConfigError,
            "num_envs is 2, but env.n_envs of the config is 7",
        ),
    ],
)
def test_impossible_settings_are_refused(
    keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gymnasium.make_vec(ID, num_envs=2, **keywords)


def test_make_makes_one_host() -> None:
    env = gymnasium.make(ID, task="planted", episode_length=3)
    assert isinstance(env.unwrapped, SingleEnv)
    assert env.unwrapped.env.horizon == 3
    for keyword in ("num_envs", "autoreset_mode"):
        with pytest.raises(
            TypeError,
            match=rf"{keyword}: not available for one env; use gymnasium.make_vec",
        ):
            make_single(**{keyword: 2})


def test_gymnasiums_own_vector_env_takes_the_one_env_view() -> None:
    env = gymnasium.make_vec(
        ID, num_envs=2, vectorization_mode="sync", task="planted", episode_length=2
    )
    assert isinstance(env, SyncVectorEnv)
    observation, _ = env.reset(seed=0)
    assert not np.array_equal(observation[0], observation[1]), (
        "each has a seed of its own"
    )


def test_a_spec_makes_the_same_env_again() -> None:
    env = gymnasium.make_vec(ID, num_envs=2, task="planted", reward={"mode": "sparse"})
    assert env.spec is not None
    again = gymnasium.make_vec(env.spec)
    assert isinstance(again, PlantedVectorEnv)
    assert again.config == env.unwrapped.config  # type: ignore[attr-defined]


def test_make_env_takes_a_users_task() -> None:
    task = replace(digits(), name="mine", n_envs=3)
    env = make_env(tiny_config(2, 3), task=task)
    assert isinstance(env, GrowthVectorEnv)
    assert (env.num_envs, env.config.task.name, env.task.name) == (2, "mine", "mine")
    assert env.action_spec.slots == ("r0c0", "r0c1", "r1c0", "r1c1"), (
        "those of the given host"
    )
    env.close()
