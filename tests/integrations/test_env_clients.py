"""The vector env with other libraries for reinforcement learning."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode


def made() -> Any:
    return gymnasium.make_vec(
        "esper.env:esper/Growth-v0",
        num_envs=3,
        task="planted",
        episode_length=6,
        autoreset_mode=AutoresetMode.DISABLED,
    )


def actions(env: Any, generator: np.random.Generator) -> np.ndarray:
    return np.stack(
        [generator.integers(0, n, 3) for n in env.single_action_space.nvec], 1
    )


def test_torchrl_sees_what_a_twin_that_is_reset_by_hand_gives() -> None:
    pytest.importorskip("torchrl")
    from torchrl.envs import GymWrapper, set_gym_backend

    logging.disable(logging.INFO)
    twin = made()
    with set_gym_backend("gymnasium"):
        env = GymWrapper(made(), categorical_action_encoding=True)
    env.set_seed(3)
    state = env.reset()
    twin.reset(seed=3)
    wanted, _ = twin.reset()
    np.testing.assert_array_equal(state["observation"].numpy(), wanted)
    generator, ends = np.random.default_rng(0), 0
    for _ in range(15):
        chosen = actions(twin, generator)
        state["action"] = torch.tensor(chosen)
        step, state = env.step_and_maybe_reset(state)
        wanted, rewards, terminated, truncated, _ = twin.step(chosen)
        np.testing.assert_allclose(
            step["next"]["reward"].numpy().ravel(), rewards, atol=1e-5
        )
        np.testing.assert_array_equal(
            step["next"]["terminated"].numpy().ravel(), terminated
        )
        ended = terminated | truncated
        ends += int(ended.sum())
        if ended.any():
            wanted, _ = twin.reset(options={"reset_mask": ended})
        np.testing.assert_allclose(state["observation"].numpy(), wanted, atol=1e-5)
    assert ends == 6


def test_skrl_sees_what_a_twin_gives() -> None:
    pytest.importorskip("skrl")
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.utils import set_seed

    set_seed(11)
    twin, env = made(), wrap_env(made(), wrapper="gymnasium", verbose=False)
    seen, _ = env.reset()
    wanted, _ = twin.reset(seed=11)
    np.testing.assert_allclose(seen.numpy(), wanted)
    generator = np.random.default_rng(0)
    for _ in range(5):
        chosen = actions(twin, generator)
        seen, rewards, terminated, *_ = env.step(torch.tensor(chosen))
        wanted, paid, ended, *_ = twin.step(chosen)
        np.testing.assert_allclose(seen.numpy(), wanted)
        np.testing.assert_allclose(rewards.numpy().ravel(), paid, atol=1e-6)
        np.testing.assert_array_equal(terminated.numpy().ravel(), ended)
