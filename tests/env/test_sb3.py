"""The vector env behind Stable-Baselines3's API, for its agents and those of sb3-contrib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from esper.env.flat_action import FlatActionVector
from esper.env.sb3 import SB3VecEnv
from esper.env.slot_env import SlotVectorEnv
from tests.core_helpers import DAMAGE, digits, flat_baseline, tiny_config, wait_actions


def vector(n_envs: int = 3, **keywords: Any) -> SlotVectorEnv:
    made = gymnasium.make_vec(
        "esper/Growth-v0", num_envs=n_envs, task="planted", **keywords
    )
    assert isinstance(made, SlotVectorEnv)
    return made


def test_the_wrapper_passes_on_results_of_the_vector_env() -> None:
    venv, env = SB3VecEnv(vector(episode_length=3)), vector(episode_length=3)
    venv.seed(5)
    expected, _ = env.reset(seed=5)
    np.testing.assert_array_equal(venv.reset(), expected)
    for step in range(1, 8):
        observation, rewards, done, infos = venv.step(wait_actions(3))
        expected, wanted, terminated, _, info = env.step(wait_actions(3))
        np.testing.assert_array_equal(observation, expected)
        np.testing.assert_array_equal(rewards, wanted.astype(np.float32))
        assert done.tolist() == terminated.tolist() == [step % 3 == 0] * 3
        assert [i["TimeLimit.truncated"] for i in infos] == [False] * 3, (
            "the horizon is a true end"
        )
        for index in range(3):
            assert ("terminal_observation" in infos[index]) == done[index]
            if done[index]:
                np.testing.assert_array_equal(
                    infos[index]["terminal_observation"], info["final_obs"][index]
                )
                assert (
                    infos[index]["validation_accuracy"]
                    == info["final_info"]["validation_accuracy"][index]
                )
                assert (
                    venv.reset_infos[index]["validation_accuracy"]
                    == info["validation_accuracy"][index]
                )
            assert sum(infos[index]["reward_terms"].values()) == pytest.approx(
                wanted[index]
            )


def test_a_seed_holds_for_one_reset() -> None:
    venv = SB3VecEnv(vector())
    venv.seed(5)
    first, second = venv.reset(), venv.reset()
    assert not np.array_equal(first, second)
    venv.seed(5)
    np.testing.assert_array_equal(venv.reset(), first)


def test_sb3_contrib_reads_the_masks() -> None:
    for env in (vector(), FlatActionVector(vector())):
        venv = SB3VecEnv(env)
        venv.reset()
        assert is_masking_supported(venv)
        np.testing.assert_array_equal(get_action_masks(venv), env.action_masks())
        np.testing.assert_array_equal(
            venv.env_method("action_masks", indices=[2, 0]), env.action_masks()[[2, 0]]
        )
        np.testing.assert_array_equal(
            venv.env_method("action_masks", indices=1), env.action_masks()[[1]]
        )


def test_attributes_are_those_of_the_vector_env_through_its_wrappers() -> None:
    venv = SB3VecEnv(
        FlatActionVector(RecordEpisodeStatistics(vector(episode_length=7)))
    )
    assert venv.get_attr("horizon", indices=[0, 2]) == [7, 7]
    assert venv.get_attr("render_mode") == [None] * 3
    assert not venv.has_attr("no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        venv.get_attr("no_such_thing")
    with pytest.raises(AttributeError, match=r"they have: action_masks\(\)"):
        venv.env_method("no_such_thing")
    with pytest.raises(AttributeError, match=r"venv\.env\.horizon"):
        venv.set_attr("horizon", 3)
    assert venv.env_is_wrapped(gymnasium.Wrapper) == [False] * 3


def test_an_env_that_is_not_reset_by_itself_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"needs autoreset_mode=AutoresetMode\.SAME_STEP, the env has DISABLED",
    ):
        SB3VecEnv(vector(autoreset_mode="Disabled"))


def test_options_of_a_reset_are_refused() -> None:
    venv = SB3VecEnv(vector())
    venv.set_options({"colour": "red"})
    with pytest.raises(ValueError, match="no options"):
        venv.reset()


def test_an_episode_that_was_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    env = vector(2)
    step = env.loop.step

    def cut_short(actions: Any) -> None:
        step(actions)
        env.state.truncated[0] = env.state.done[0] = True

    monkeypatch.setattr(env.loop, "step", cut_short)
    venv = SB3VecEnv(env)
    venv.reset()
    observation, _, done, infos = venv.step(wait_actions(2))
    assert done.tolist() == [True, False]
    assert [info["TimeLimit.truncated"] for info in infos] == [True, False]
    assert env.layout.read(infos[0]["terminal_observation"], "epoch") == pytest.approx(
        1 / env.horizon
    )
    assert env.layout.read(observation[0], "epoch") == 0
    assert "terminal_observation" not in infos[1]
    assert env.state.episode.tolist() == [1, 0]  # only the first was reset


def test_a_rollback_that_ends_the_episode_is_no_time_limit() -> None:
    from esper.env.vector_env import GrowthVectorEnv

    config = tiny_config(2, 5, governor={"max_rollbacks": 1})
    env = GrowthVectorEnv(
        digits(), config, baseline=flat_baseline(5), autoreset_mode="SameStep"
    )
    venv = SB3VecEnv(env)
    venv.seed(0)
    venv.reset()
    venv.step(wait_actions(2))
    DAMAGE["NaN weight"](env.training[0])
    _, _, done, infos = venv.step(wait_actions(2))
    assert done.tolist() == [True, False]
    assert [info["TimeLimit.truncated"] for info in infos] == [False, False]
    assert [info["reward_terms"]["governor"] for info in infos] == [-10, 0]
    venv.close()


def test_wrappers_and_evaluation_of_stable_baselines_work() -> None:
    venv = VecMonitor(
        VecNormalize(SB3VecEnv(vector(episode_length=5)), norm_reward=False)
    )
    model = PPO("MlpPolicy", venv, n_steps=10, batch_size=15, n_epochs=1, device="cpu")
    model.learn(60)
    assert [episode["l"] for episode in model.ep_info_buffer or ()] == [5] * 12
    returns, lengths = evaluate_policy(
        model, venv, n_eval_episodes=3, return_episode_rewards=True
    )
    assert lengths == [5] * 3
    assert np.isfinite(returns).all()


def test_maskable_ppo_plays_heads_and_illegal_actions_are_counted() -> None:
    """The mask of the slot head is a union over ops, so a pair of choices that are legal by themselves may not be."""
    venv = SB3VecEnv(
        vector(16, episode_length=10, env={"gates": {"trial_standard_errors": 1000.0}})
    )
    model = MaskablePPO(
        "MlpPolicy", venv, n_steps=10, batch_size=160, n_epochs=1, device="cpu", seed=0
    )
    counted: list[int] = []

    def count(local: dict[str, Any], _global: dict[str, Any]) -> bool:
        counted.extend(
            info["illegal_actions"]
            for info in local["infos"]
            if "terminal_observation" in info
        )
        return True

    model.learn(640, callback=count)
    assert len(counted) == 64
    assert 0 < sum(counted) < 64, "few of 640"


def test_a_plain_dqn_plays_flat_actions() -> None:
    """It has no masks: an illegal action is executed as WAIT, and is counted."""
    venv = SB3VecEnv(FlatActionVector(vector(4, episode_length=5)))
    model = DQN(
        "MlpPolicy",
        venv,
        learning_starts=20,
        buffer_size=200,
        batch_size=16,
        device="cpu",
        seed=0,
    )
    counted: list[int] = []

    def count(local: dict[str, Any], _global: dict[str, Any]) -> bool:
        counted.extend(
            info["illegal_actions"]
            for info in local["infos"]
            if "terminal_observation" in info
        )
        return True

    model.learn(60, callback=count)
    assert len(counted) == 12
    assert sum(counted) > 0


def test_without_stable_baselines_the_error_names_the_install_command(
    tmp_path: Path,
) -> None:
    script = "import sys; sys.modules['stable_baselines3'] = None; import esper.env.make; import esper.env.sb3"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert (
        "ImportError: esper.env.sb3 needs Stable-Baselines3; pip install"
        in found.stderr
    )
