"""Models of Stable-Baselines3 and sb3-contrib as controllers: their inputs, and hosts that are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from gymnasium.vector import VectorEnv
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.utils import get_action_masks
from stable_baselines3 import DQN
from stable_baselines3.common.vec_env import VecNormalize

from esper.agents.make import controller_for
from esper.agents.sb3 import SB3Controller
from esper.compare.comparison import compare_controllers
from esper.config import ConfigError, TrainingConfig
from esper.env.flat_action import FlatActionVector
from esper.env.make import make_env
from esper.env.sb3 import SB3VecEnv
from esper.env.slot_env import SlotVectorEnv
from esper.rollout.rollout import Rollout
from tests.core_helpers import digits, tiny_config

E, HORIZON = 3, 5
CONFIG = TrainingConfig.parse(
    {"task": {"name": "planted"}, "env": {"n_envs": E, "episode_length": HORIZON}}
)
Wrap = Callable[[VectorEnv[Any, Any, Any]], VectorEnv[Any, Any, Any]]


def vector(wrap: Wrap = lambda env: env) -> SB3VecEnv:
    keywords: dict[str, Any] = {"task": "planted", "episode_length": HORIZON}
    return SB3VecEnv(
        wrap(gymnasium.make_vec("esper/Growth-v0", num_envs=E, **keywords))
    )


def untrained(algorithm: Any, wrap: Wrap = lambda env: env, **keywords: Any) -> Any:
    policy = "MlpLstmPolicy" if algorithm is RecurrentPPO else "MlpPolicy"
    return algorithm(policy, vector(wrap), seed=1, device="cpu", **keywords)


def rollout(make: Callable[[SlotVectorEnv], SB3Controller]) -> Rollout:
    env = make_env(CONFIG)
    played = Rollout(env, controller_for(make, CONFIG, env, 0))
    played.begin(seed=7)
    return played


def taken(made: Rollout, steps: int = HORIZON) -> list[Any]:
    """The actions of the next steps."""
    actions: list[Any] = []
    act = made.controller.act
    made.controller.act = lambda *given: actions.append(act(*given)) or actions[-1]  # type: ignore[method-assign,func-returns-value]
    for _ in range(steps):
        made.step()
    made.controller.act = act  # type: ignore[method-assign]
    return [action.tolist() for action in actions]


@pytest.mark.parametrize("flat", [False, True], ids=["heads", "flat"])
def test_a_maskable_model_plays_as_in_its_own_library(flat: bool) -> None:
    wrap: Wrap = FlatActionVector if flat else lambda env: env
    model = untrained(MaskablePPO, wrap)
    venv = VecNormalize(vector(wrap), norm_reward=False)
    venv.obs_rms.mean += 0.3  # as if it had learned from other observations
    made = rollout(partial(SB3Controller, model, normalize=venv))
    ours = taken(made)
    venv.training = False
    venv.seed(7)
    observation = venv.reset()
    theirs = []
    for _ in range(HORIZON):
        chosen, _ = model.predict(
            observation, action_masks=get_action_masks(venv), deterministic=True
        )
        theirs.append(
            (venv.venv.env.table.actions[chosen] if flat else chosen).tolist()
        )  # type: ignore[attr-defined]
        observation, *_ = venv.step(chosen)
    assert ours == theirs
    if flat:
        assert made.stats().illegal_actions.tolist() == [0] * E


def test_a_recurrent_model_remembers_within_an_episode_and_resumes() -> None:
    model = untrained(RecurrentPPO)
    make = partial(SB3Controller, model)
    whole = taken(rollout(make))
    first = rollout(make)
    begun = taken(first, 2)
    state = first.state_dict()
    rest = rollout(make)
    rest.load_state_dict(state)
    assert begun + taken(rest, HORIZON - 2) == whole
    memory = first.controller.memory_state()
    assert [tuple(part.shape) for part in memory["state"]] == [(1, E, 256)] * 2
    first.begin(seed=7)
    assert taken(first) == whole, "a new episode starts without a memory"


def test_the_memory_of_a_recurrent_model_changes_what_it_plays() -> None:
    controller = rollout(partial(SB3Controller, untrained(RecurrentPPO))).controller
    observation = (
        np.random.default_rng(0)
        .normal(size=(E, make_env(CONFIG).layout.size))
        .astype(np.float32)
    )
    controller.act(observation, {})
    before = controller.memory_state()["state"][0]
    controller.act(observation, {})
    assert not np.array_equal(controller.memory_state()["state"][0], before)


def test_a_model_without_masks_plays_and_its_illegal_actions_are_counted() -> None:
    made = rollout(
        partial(SB3Controller, untrained(DQN, FlatActionVector, buffer_size=10))
    )
    taken(made)
    assert made.over
    assert (made.stats().illegal_actions >= 0).all()


def test_a_model_is_an_arm_like_any_other() -> None:
    model = untrained(MaskablePPO, FlatActionVector)
    arms = compare_controllers(CONFIG, [partial(SB3Controller, model), "none"], pairs=3)
    assert [arm.controller for arm in arms] == ["callable:SB3Controller", "none"]


def test_a_model_of_other_hosts_is_refused() -> None:
    model = untrained(MaskablePPO)
    fewer = CONFIG.with_values(env={"blueprints": ["moss", "fern"]})
    with pytest.raises(
        ConfigError,
        match=r"plays hosts with as many slots and blueprints as those it learned on",
    ):
        SB3Controller(model, make_env(fewer))
    model.action_space = Discrete(7)
    with pytest.raises(
        ConfigError,
        match=r"trained on actions Discrete\(7\), but this env has Discrete\(\d+\) ",
    ):
        SB3Controller(model, make_env(CONFIG))
    four_slots = make_env(tiny_config(), task=digits())
    with pytest.raises(
        ConfigError,
        match=r"observations of shape \(\d+,\), but this env's have \(\d+,\)",
    ):
        SB3Controller(model, four_slots)
    four_slots.close()
