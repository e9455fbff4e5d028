"""The one-env view: the checkers of Gymnasium and Stable-Baselines3, the vector env behind it, and its info dict."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import gymnasium.utils.env_checker
import numpy as np
import pytest
import stable_baselines3.common.env_checker
from stable_baselines3.common.env_util import make_vec_env

from esper.config import TrainingConfig
from esper.core.action import Op
from esper.env.flat_action import FlatAction
from esper.env.planted import PlantedVectorEnv
from esper.env.single import SingleEnv, of_env


def planted(horizon: int = 50, seed: int = 0) -> SingleEnv:
    tables = {"env": {"n_envs": 1, "episode_length": horizon}, "run": {"seed": seed}}
    return SingleEnv(PlantedVectorEnv(TrainingConfig.parse(tables)))


@pytest.mark.parametrize(
    "checker", [gymnasium.utils.env_checker, stable_baselines3.common.env_checker]
)
def test_the_checkers_find_nothing_to_warn_of(checker: Any) -> None:
    env = gymnasium.make("esper/Growth-v0", task="planted").unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(env)


def test_the_checkers_pass_a_flat_action_too() -> None:
    env = gymnasium.make("esper/Growth-v0", task="planted")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stable_baselines3.common.env_checker.check_env(FlatAction(env.unwrapped))
        # Gymnasium's would have a wrapper unwrapped, which would leave nothing to check.
        warnings.filterwarnings(
            "ignore", message=".*is different from the unwrapped version"
        )
        gymnasium.utils.env_checker.check_env(
            FlatAction(env.unwrapped), skip_close_check=True
        )


@pytest.mark.finding("M2")
def test_one_env_is_the_vector_env_of_one_host() -> None:
    env, vector = (
        planted(),
        PlantedVectorEnv(TrainingConfig.parse({"env": {"n_envs": 1}})),
    )
    observation, info = env.reset(seed=3)
    wanted, wanted_info = vector.reset(seed=3)
    action = env.action_spec.encode(Op.GERMINATE, "r0c0", "fern")
    for _ in range(3):
        np.testing.assert_array_equal(observation, wanted[0])
        np.testing.assert_array_equal(
            info["action_mask"]["op_slot"], wanted_info["action_mask"]["op_slot"][0]
        )
        assert info["validation_accuracy"] == wanted_info["validation_accuracy"][0]
        assert type(info["illegal_actions"]) is int
        np.testing.assert_array_equal(env.action_masks(), vector.action_masks()[0])
        observation, reward, terminated, truncated, info = env.step(action)
        wanted, rewards, _, _, wanted_info = vector.step(action[None])
        assert (reward, terminated, truncated) == (rewards[0], False, False)
        assert type(reward) is float
        assert reward == pytest.approx(sum(info["reward_terms"].values()))


def test_a_seed_starts_the_same_episodes_and_no_seed_the_next_one() -> None:
    env = planted()
    first = [env.reset(seed=3)[0], env.reset()[0], env.reset()[0]]
    again = [env.reset(seed=3)[0], env.reset()[0], env.reset()[0]]
    np.testing.assert_array_equal(first, again)
    assert len({observation.tobytes() for observation in first}) == 3
    assert env.reset(seed=4)[0].tobytes() not in {
        observation.tobytes() for observation in first
    }


def test_an_ended_episode_needs_a_reset() -> None:
    env = planted(horizon=2)
    wait = env.action_spec.encode(Op.WAIT)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(wait)
    env.reset()
    assert [env.step(wait)[2] for _ in range(2)] == [False, True]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(wait)
    observation, _ = env.reset()
    assert env.layout.read(observation, "epoch") == 0
    assert env.step(wait)[2] is False


@pytest.mark.parametrize("shape", [(), (7,), (1, 8)])
def test_an_action_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    env = planted()
    env.reset()
    with pytest.raises(ValueError, match=r"expected \(8,\)"):
        env.step(np.zeros(shape, dtype=np.int64))


@pytest.mark.parametrize("wrong", [0.0, 0.5, True, None, "0", float("nan")])
def test_an_action_that_is_no_integer_is_refused_at_every_door(wrong: Any) -> None:
    env = planted()
    env.reset()
    for step, action in ((env.step, [wrong] * 8), (env.env.step, [[wrong] * 8])):
        with pytest.raises(ValueError, match="must be integers"):
            step(action)
    assert env.env.state.epoch.tolist() == [0]
    env.step([0] * 8)
    env.env.step([[0] * 8])
    assert env.env.state.epoch.tolist() == [2]


def test_a_view_of_many_or_of_what_resets_itself_is_refused() -> None:
    two = TrainingConfig.parse({"env": {"n_envs": 2}})
    one = TrainingConfig.parse({"env": {"n_envs": 1}})
    for env in (
        PlantedVectorEnv(two),
        PlantedVectorEnv(one, autoreset_mode="SameStep"),
    ):
        with pytest.raises(ValueError, match="one env, autoreset DISABLED"):
            SingleEnv(env)


def test_stable_baselines_makes_several_by_their_id() -> None:
    """It first tries a render mode, and falls back on a TypeError."""
    venv = make_vec_env(
        "esper/Growth-v0", n_envs=2, seed=0, env_kwargs={"task": "planted"}
    )
    observation = venv.reset()
    assert not np.array_equal(observation[0], observation[1])
    assert np.array(venv.env_method("action_masks")).shape == (2, 32)


def made(**keywords: Any) -> Any:
    return gymnasium.make(
        "esper.env:esper/Growth-v0", task="planted", episode_length=6, **keywords
    ).unwrapped


def test_envs_made_without_a_seed_play_different_hosts_and_those_with_one_the_same() -> (
    None
):
    one, two = (made().reset()[0] for _ in range(2))
    assert not np.array_equal(one, two)
    for keywords in ({"run": {"seed": 3}}, {"config": {"run": {"seed": 3}}}):
        np.testing.assert_array_equal(
            made(**keywords).reset()[0], made().reset(seed=3)[0]
        )
    config = TrainingConfig.parse(
        {"run": {"seed": 3}, "task": {"name": "planted"}, "env": {"episode_length": 6}}
    )
    env = gymnasium.make("esper.env:esper/Growth-v0", config=config).unwrapped
    np.testing.assert_array_equal(env.reset()[0], made().reset(seed=3)[0])


@pytest.mark.parametrize(
    "make", [planted, lambda: planted().env], ids=["single", "vector"]
)
@pytest.mark.parametrize(
    "seed",
    [(1, 2), [1, 2], -1, 3.7, "3", float("nan"), np.array([1, 2]), np.int64(-1)],
    ids=str,
)
def test_a_seed_that_is_refused_leaves_the_env_as_it_was(make: Any, seed: Any) -> None:
    env = make()
    with pytest.raises(ValueError, match="seed"):
        env.reset(seed=seed)
    np.testing.assert_array_equal(env.reset()[0], make().reset()[0])
    for number in (7, np.int64(7), np.uint8(7), np.array(7)):
        np.testing.assert_array_equal(
            env.reset(seed=number)[0], make().reset(seed=7)[0]
        )


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
