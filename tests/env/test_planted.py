"""PlantedVectorEnv: the API, masks and observations of hosts in training, and what the law says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from esper.config import ConfigError, TrainingConfig
from esper.control.controller import Controller, NoGrowth
from esper.control.heuristic import HeuristicController
from esper.control.random import RandomController
from esper.control.script import ScriptedController, read_schedule, shipped_schedule
from esper.data.tasks import load_task
from esper.env.make import make_env
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import Law
from esper.lifecycle.stage import SeedStage
from esper.rewards.modes import MODES, POTENTIALS
from esper.rollout.rollout import play_round
from esper.spaces.action import HEADS, Op
from esper.spaces.observation import LIMIT

QUIET = Law(noise=0.0, paired_noise=0.0)
Step = tuple[NDArray[np.float32], NDArray[np.float64], dict[str, Any]]


def planted(n_envs: int = 4, horizon: int = 50, law: Law | None = None, **sections: dict[str, Any]) -> PlantedVectorEnv:
    env = {"n_envs": n_envs, "episode_length": horizon, **sections.pop("env", {})}
    return PlantedVectorEnv(TrainingConfig.parse({"env": env, **sections}), law)


def chance(env: PlantedVectorEnv, seed: int = 0) -> Controller:
    return RandomController(env.action_spec, env.layout, env.num_envs, seed)


def script(env: PlantedVectorEnv) -> Controller:
    return ScriptedController(read_schedule(shipped_schedule("planted")), env.action_spec, env.layout, env.num_envs)


def play(env: PlantedVectorEnv, player: Controller, seed: int | None = 0) -> list[Step]:
    """Observation, rewards and info of the reset (rewards 0) and of every step of one episode."""
    observation, info = env.reset(seed=seed)
    player.begin()
    steps: list[Step] = [(observation, np.zeros(env.num_envs), info)]
    while not env.done.all():
        observation, rewards, _, _, info = env.step(player.act(observation, info["action_mask"]))
        steps.append((observation, rewards, info))
    return steps


def waits(env: PlantedVectorEnv) -> NDArray[np.int64]:
    return np.zeros((env.num_envs, len(HEADS)), dtype=np.int64)


def test_it_is_a_gymnasium_vector_env_with_the_spaces_of_its_layout() -> None:
    env = make_env(TrainingConfig.parse({"task": {"name": "planted"}}))
    assert isinstance(env, gymnasium.vector.VectorEnv)
    assert (env.num_envs, env.horizon) == (64, 50)
    assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    assert env.single_observation_space == gymnasium.spaces.Box(-LIMIT, LIMIT, (env.layout.size,), np.float32)
    assert env.single_action_space == gymnasium.spaces.MultiDiscrete([6, 3, 4, 4, 3, 3, 4, 5])
    observation, info = env.reset(seed=0)
    assert observation in env.observation_space
    assert env.action_masks().shape == (64, 6 + 3 + 4 + 4 + 3 + 3 + 4 + 5)
    assert set(info["action_mask"]) == {*HEADS, "op_slot", "slot_blueprint"}
    assert np.flatnonzero(info["action_mask"]["op"][0]).tolist() == [Op.WAIT, Op.GERMINATE]


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
    rows = np.stack([env.action_spec.encode(Op.FOSSILIZE, "r0c0"), env.action_spec.encode(Op.WAIT)])
    observation, _, _, _, info = env.step(rows)
    assert info["illegal_actions"].tolist() == [1, 0]
    assert env.layout.read(observation, "last_op_wait").tolist() == [1, 1]
    assert info["reward_terms"]["action_cost"].tolist() == [0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_rewards_are_the_sum_of_their_terms_and_potentials_telescope(mode: str) -> None:
    env = planted(16, reward={"mode": mode})
    steps = play(env, chance(env))
    discounts = env.config.reward.gamma ** np.arange(env.horizon)
    for _, rewards, info in steps[1:]:
        np.testing.assert_allclose(sum(info["reward_terms"].values()), rewards, atol=1e-12)
    for name in set(MODES[mode]) & set(POTENTIALS):
        paid = np.array([info["reward_terms"][name] for _, _, info in steps[1:]])  # [T, E]
        assert np.abs(paid).max() > 0.01
        np.testing.assert_allclose(discounts @ paid, 0.0, atol=1e-12)


def test_the_same_seed_is_the_same_run_and_another_one_is_not() -> None:
    first, second, other = (play(planted(), chance(planted()), seed) for seed in (3, 3, 4))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])
    assert any((a[1] != b[1]).any() for a, b in zip(first, other, strict=True))


def test_an_env_does_not_depend_on_how_many_there_are() -> None:
    few, many = planted(3), planted(9)
    for a, b in zip(play(few, chance(few)), play(many, chance(many)), strict=True):
        np.testing.assert_array_equal(a[0], b[0][:3])
        np.testing.assert_array_equal(a[1], b[1][:3])


def test_an_ended_env_idles_until_it_is_reset_and_leaves_the_others_alone() -> None:
    env = planted(2, horizon=3)
    env.reset(seed=0)
    for _ in range(3):
        last, _, terminated, truncated, _ = env.step(waits(env))
    assert terminated.all()
    assert not truncated.any()
    grow = np.stack([env.action_spec.encode(Op.GERMINATE, "r0c0", "fern")] * 2)
    observation, rewards, terminated, _, info = env.step(grow)
    assert info["idle"].all()
    assert terminated.all()
    assert rewards.tolist() == [0, 0]
    np.testing.assert_array_equal(observation, last)
    assert not any(term.any() for term in info["reward_terms"].values())

    observation, info = env.reset(options={"reset_mask": np.array([True, False])})
    assert info["idle"].tolist() == [False, True]
    np.testing.assert_array_equal(observation[1], last[1])
    assert env.layout.read(observation, "epoch").tolist() == [0, 1]
    first_episode = play(planted(2, horizon=3), NoGrowth(env.action_spec, env.layout, 2))[0][0]
    assert (observation[0] != first_episode[0]).any(), "the second episode has noise of its own"
    observation, rewards, terminated, _, info = env.step(grow)
    assert terminated.tolist() == [False, True]
    assert env.state.slots.stage[:, 0].tolist() == [SeedStage.GERMINATED, SeedStage.DORMANT]
    np.testing.assert_array_equal(observation[1], last[1])


def test_observations_are_finite_and_in_their_space_whatever_is_done() -> None:
    env = planted(16, env={"one_incubating": False})
    random = np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(env.horizon):
        observation = env.step(random.integers(env.action_spec.sizes, size=(16, 8)))[0]
        assert np.isfinite(observation).all()
        assert observation in env.observation_space


def test_a_host_alone_follows_the_baseline() -> None:
    env = planted(2, law=QUIET)
    assert env.horizon == 50
    for epoch, (_, _, info) in enumerate(play(env, NoGrowth(env.action_spec, env.layout, 2))):
        curve = 10 + 55 * (1 - np.exp(-epoch / 10))  # floor, ceiling − floor, host_time · T
        np.testing.assert_allclose(info["validation_accuracy"], curve)
        np.testing.assert_allclose(info["baseline_accuracy"], curve)


def test_noise_has_its_standard_deviation_and_moves_all_configurations_together() -> None:
    env = planted(64)
    steps = play(env, NoGrowth(env.action_spec, env.layout, 64))
    errors = np.array([info["validation_accuracy"] - info["baseline_accuracy"] for _, _, info in steps])
    assert errors.std() == pytest.approx(0.3, rel=0.1)  # 3264 draws: 1.2 % standard error
    assert abs(errors.mean()) < 0.03
    np.testing.assert_array_equal(steps[-1][2]["validation_accuracy"], steps[-1][2]["committed_accuracy"])


def test_the_loss_of_every_configuration_follows_its_accuracy() -> None:
    env = planted(4)
    env.reset(seed=0)
    rows, fleet = life(env, 0, "fern"), env.state
    for epoch in range(20):
        env.step(np.tile(rows.get(epoch, env.action_spec.encode(Op.WAIT)), (4, 1)))
        for accuracy, loss in (
            (fleet.accuracy, fleet.loss),
            (fleet.committed, fleet.committed_loss),
            (fleet.all_off, fleet.all_off_loss),
        ):
            np.testing.assert_allclose(loss, np.log(10) * (100 - accuracy) / 90)
    assert (fleet.committed_loss < fleet.all_off_loss).all()


def grown(env: PlantedVectorEnv, rows: dict[int, NDArray[np.int64]]) -> float:
    """Final committed accuracy above the baseline of one env that takes these actions at these epochs, pp."""
    env.reset(seed=0)
    for epoch in range(env.horizon):
        info = env.step(rows.get(epoch, env.action_spec.encode(Op.WAIT))[None])[4]
    return float((info["committed_accuracy"] - info["baseline_accuracy"])[0])


def life(env: PlantedVectorEnv, start: int, blueprint: str, incubation: int = 4, **heads: Any) -> dict[int, Any]:
    """One seed in r0c0 from ``start`` to a fossil, at a tempo of 3 epochs if ``heads`` do not say."""
    encode, tempo = env.action_spec.encode, heads.pop("tempo", 3)
    blended = start + 1 + incubation
    return {
        start: encode(Op.GERMINATE, "r0c0", blueprint, tempo=tempo, **heads),
        start + 1: encode(Op.ADVANCE, "r0c0"),
        blended: encode(Op.ADVANCE, "r0c0"),
        blended + tempo - 1: encode(Op.ADVANCE, "r0c0"),
        blended + tempo: encode(Op.FOSSILIZE, "r0c0"),
    }


def test_the_law_rewards_the_right_blueprint_early() -> None:
    # Errors of trials let the gate be told to tolerate anything; committed accuracy has none.
    env = planted(1, law=replace(QUIET, paired_noise=0.3), env={"gates": {"trial_standard_errors": 1000.0}})
    fern, moss, oak = (grown(env, life(env, 0, name)) for name in ("fern", "moss", "oak"))
    assert fern > moss > 0 > oak
    assert fern > grown(env, life(env, 10, "fern")) > grown(env, life(env, 25, "fern"))
    assert fern > grown(env, life(env, 0, "fern", style="GATED_GATE")) > moss


def test_blending_too_early_and_pruning_in_a_jump_hurt() -> None:
    patient, hasty = (planted(1, law=replace(QUIET, worth=((0.0,) * 4,) * 3, rising_shock=r)) for r in (0.0, 9.0))
    assert grown(patient, life(patient, 0, "fern")) == pytest.approx(0.0)
    early, late = (grown(hasty, life(hasty, 0, "fern", incubation)) for incubation in (4, 12))
    assert early < late < 0
    env = planted(1, law=QUIET)
    kept = life(env, 0, "fern")
    *_, fossilized = kept
    prune = {
        speed: {**kept, fossilized: env.action_spec.encode(Op.PRUNE, "r0c0", alpha_speed=speed)} for speed in (0, 8)
    }
    assert grown(env, prune[0]) < grown(env, prune[8]) < 0


def test_neighbours_of_positive_worth_help_each_other() -> None:
    law = replace(QUIET, synergy=2.0)
    env = planted(1, law=law)
    env.reset(seed=0)
    seeds, hosts = env.state.slots, env.backend
    seeds.stage[0] = [SeedStage.FOSSILIZED] * 3
    seeds.blueprint[0] = [1, 2, 2]  # 8, 9 and −5 pp
    seeds.alpha[0] = [1.0, 0.5, 1.0]
    hosts.experience[:] = 1e9
    true = hosts.true_accuracies(seeds, np.array([50]))
    host = law.host_accuracy(np.array([50]), 50)
    np.testing.assert_allclose(true.interaction, [[1.0, 1.0, 0.0]])  # 2 · 1 · 0.5
    np.testing.assert_allclose(true.contribution, [[9.0, 5.5, -5.0]])
    np.testing.assert_allclose(true.committed - host, [8 + 4.5 - 5 + 1])


def test_gate_two_refuses_a_harmful_seed_and_charges_for_it() -> None:
    env = planted(1, law=QUIET)
    env.reset(seed=0)
    rows = life(env, 0, "oak")
    for epoch in range(6):
        _, _, _, _, info = env.step(rows.get(epoch, env.action_spec.encode(Op.WAIT))[None])
    assert env.state.slots.stage[0, 0] == SeedStage.TRAINING
    assert not env.state.succeeded[0]
    assert info["reward_terms"]["action_cost"][0] == -env.config.reward.refused_cost


def test_wait_is_zero_chance_is_no_better_and_a_rule_and_a_script_can_win() -> None:
    env = planted(32)
    spec, layout = env.action_spec, env.layout
    alone, random, rule, scripted = (
        play_round(env, player, seed=0).returns
        for player in (NoGrowth(spec, layout, 32), chance(env), HeuristicController(spec, layout, 32), script(env))
    )
    assert abs(alone.mean()) < 0.03
    assert random.mean() < alone.mean()
    assert alone.mean() < rule.mean() < scripted.mean()
    assert scripted.mean() > 1
    assert np.all(env.state.slots.stage == SeedStage.FOSSILIZED), "the script's gates open in every env"
