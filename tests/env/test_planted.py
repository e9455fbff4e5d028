"""PlantedVectorEnv: the API, masks and observations of hosts in training, for simulated hosts."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from esper.agents.controller import Controller, NoGrowth, RandomController
from esper.agents.heuristic import HeuristicController
from esper.agents.script import ScriptedController, read_schedule, shipped_schedule
from esper.config import ConfigError, TrainingConfig
from esper.core.action import HEADS, Op
from esper.core.observation import LIMIT
from esper.core.stage import SeedStage
from esper.data.tasks import load_task
from esper.env.make import make_env
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.run.rollout import play_round
from tests.env.planted_helpers import life, planted, play

QUIET = SimParams(noise=0.0, paired_noise=0.0)


def chance(env: PlantedVectorEnv, seed: int = 0) -> Controller:
    return RandomController(env.action_spec, env.layout, env.num_envs, seed)


def script(env: PlantedVectorEnv) -> Controller:
    return ScriptedController(
        read_schedule(shipped_schedule("planted")),
        env.action_spec,
        env.layout,
        env.num_envs,
    )


def waits(env: PlantedVectorEnv) -> NDArray[np.int64]:
    return np.zeros((env.num_envs, len(HEADS)), dtype=np.int64)


def test_the_env_is_a_gymnasium_vector_env_with_the_spaces_of_its_layout() -> None:
    env = make_env(TrainingConfig.parse({"task": {"name": "planted"}}))
    assert isinstance(env, gymnasium.vector.VectorEnv)
    assert (env.num_envs, env.horizon) == (64, 50)
    assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    assert env.single_observation_space == gymnasium.spaces.Box(
        -LIMIT, LIMIT, (env.layout.size,), np.float32
    )
    assert env.single_action_space == gymnasium.spaces.MultiDiscrete(
        [6, 3, 4, 4, 3, 3, 4, 5]
    )
    observation, info = env.reset(seed=0)
    assert observation in env.observation_space
    joined = [info["action_mask"][head] for head in HEADS]
    np.testing.assert_array_equal(env.action_masks(), np.concatenate(joined, axis=1))
    assert set(info["action_mask"]) == {*HEADS, "op_slot", "slot_blueprint"}
    assert np.flatnonzero(info["action_mask"]["op"][0]).tolist() == [
        Op.WAIT,
        Op.GERMINATE,
    ]


def test_a_task_that_is_simulated_has_nothing_to_load() -> None:
    with pytest.raises(ConfigError, match=r"planted.*simulated.*make_env"):
        load_task("planted")
    with pytest.raises(ConfigError, match="unknown task 'nope'"):
        make_env(TrainingConfig.parse({"task": {"name": "nope"}}))


def test_the_order_of_calls_and_the_shape_of_actions_are_checked() -> None:
    env = planted()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(waits(env))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="shape"):
        env.step(waits(env)[:2])
    wrong = waits(env)
    wrong[1, 2] = 4
    with pytest.raises(ValueError, match="blueprint must be one of 0 to 3"):
        env.step(wrong)
    with pytest.raises(ValueError, match="one run seed"):
        env.reset(seed=[1, 2, 3, 4])


def test_an_illegal_action_is_wait_and_counted() -> None:
    env = planted(2)
    env.reset(seed=0)
    rows = np.stack(
        [env.action_spec.encode(Op.FOSSILIZE, "r0c0"), env.action_spec.encode(Op.WAIT)]
    )
    observation, _, _, _, info = env.step(rows)
    assert info["illegal_actions"].tolist() == [1, 0]
    assert env.layout.read(observation, "last_op_wait").tolist() == [1, 1]
    assert info["reward_terms"]["action_cost"].tolist() == [0, 0]


def test_the_same_seed_is_the_same_run_and_another_one_is_not() -> None:
    first, second, other = (
        play(planted(horizon=15), chance(planted(horizon=15)), seed)
        for seed in (3, 3, 4)
    )
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])
    assert any((a[1] != b[1]).any() for a, b in zip(first, other, strict=True))


def test_an_env_does_not_depend_on_how_many_there_are() -> None:
    few, many = planted(2, 15), planted(5, 15)
    for a, b in zip(play(few, chance(few)), play(many, chance(many)), strict=True):
        np.testing.assert_array_equal(a[0], b[0][:2])
        np.testing.assert_array_equal(a[1], b[1][:2])


def test_gate_two_refuses_a_harmful_seed_and_charges_for_it() -> None:
    env = planted(1, law=QUIET)
    env.reset(seed=0)
    rows = life(env, 0, "oak")
    for epoch in range(6):
        _, _, _, _, info = env.step(
            rows.get(epoch, env.action_spec.encode(Op.WAIT))[None]
        )
    assert env.state.slots.stage[0, 0] == SeedStage.TRAINING
    assert not env.state.succeeded[0]
    assert info["reward_terms"]["action_cost"][0] == -env.config.reward.refused_cost


@pytest.mark.trap(25)
def test_waiting_returns_zero_chance_no_more_and_a_rule_and_a_script_more() -> None:
    env = planted(16)
    spec, layout = env.action_spec, env.layout
    alone, random, rule, scripted = (
        play_round(env, player, seed=0).returns
        for player in (
            NoGrowth(spec, layout, 16),
            chance(env),
            HeuristicController(spec, layout, 16),
            script(env),
        )
    )
    assert abs(alone.mean()) < 0.05
    assert random.mean() < alone.mean()
    assert alone.mean() < rule.mean() < scripted.mean()
    assert scripted.mean() > 1
    assert np.all(env.state.slots.stage == SeedStage.FOSSILIZED), (
        "the script's gates open in every env"
    )
