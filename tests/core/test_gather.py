"""Experience gathered from episodes, and its part in observations."""

from __future__ import annotations

import numpy as np
import pytest

from esper.agents.controller import Controller
from esper.agents.make import make_controller
from esper.config import TrainingConfig
from esper.core.gather import MEAN, WORTH
from esper.core.stage import SeedStage as S
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.run.rollout import play_round

LAW = SimParams(noise=0.1, paired_noise=0.1)


def hosts(
    law: SimParams = LAW, n_envs: int = 16, seed: int = 0, length: int = 20
) -> PlantedVectorEnv:
    config = TrainingConfig.parse(
        {"env": {"n_envs": n_envs, "episode_length": length}, "run": {"seed": seed}}
    )
    return PlantedVectorEnv(config, law)


def controller(name: str, env: PlantedVectorEnv) -> Controller:
    return make_controller(
        name, "planted", env.action_spec, env.layout, env.num_envs, 0
    )


def test_plans_finds_what_pays_within_a_few_rounds() -> None:
    env = hosts()
    plans = controller("plans", env)
    gains = [
        float((end.committed - end.baseline).mean())
        for end in (play_round(env, plans) for _ in range(6))
    ]
    assert np.mean(gains[3:]) > gains[0] + 3
    worths = env.gatherer.experiences[0].worths
    assert worths.mean.argmax(axis=1).tolist() == np.argmax(LAW.worth, axis=1).tolist()


def test_observed_experience_changes_between_episodes_only() -> None:
    env = hosts()
    plans = controller("plans", env)
    play_round(env, plans)
    observation, _ = env.reset()
    plans.begin()
    start = env.gatherer.seen.copy()
    name = "r0c1/oak/worth"
    read = [env.layout.read(observation, name)]
    for _ in range(env.horizon):
        observation, *_ = env.step(
            plans.act(observation, env.mask.heads(env.action_spec))
        )
        read.append(env.layout.read(observation, name))
    np.testing.assert_array_equal(read, [read[0]] * len(read))
    np.testing.assert_array_equal(env.gatherer.seen, start)
    assert len(set(read[0].tolist())) == env.num_envs  # every env draws its own
    env.reset()
    assert (env.gatherer.seen[..., MEAN] != start[..., MEAN]).any()


def test_in_evaluation_worths_are_means_and_nothing_is_added() -> None:
    env = hosts()
    play_round(env, controller("plans", env))
    env.configure(learns=False)
    before = env.gatherer.experiences[0].state_dict()
    play_round(env, controller("plans", env))
    np.testing.assert_array_equal(
        env.gatherer.seen[..., WORTH], env.gatherer.seen[..., MEAN]
    )
    after = env.gatherer.experiences[0].state_dict()
    assert all(
        before[key] is after[key] or np.array_equal(before[key], after[key])
        for key in before
    )


def test_a_new_run_seed_forgets_all_but_what_was_given() -> None:
    env, given = hosts(), hosts()
    play_round(given, controller("plans", given))
    state = given.gatherer.experiences[0].state_dict()
    play_round(env, controller("plans", env))
    env.reset(seed=3)
    assert env.gatherer.experiences[0].episodes == 0
    assert env.gatherer.give(state)
    env.reset(seed=3)
    assert env.gatherer.experiences[0].episodes == 16
    other = hosts(LAW.only(("moss", "oak")))
    assert not other.gatherer.give(state)
    assert other.gatherer.experiences[0].episodes == 0


def test_an_episode_has_its_gain_in_accuracy_and_the_one_by_its_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        SimParams, "loss", lambda _, accuracy: ((100 - accuracy) / 40) ** 2
    )
    env = hosts()
    end = play_round(env, controller("plans", env))
    by_accuracy = np.maximum(end.committed - end.baseline, -10.0).sum()
    by_loss = np.maximum(
        env.baseline.gain_by_loss(env.state.committed_loss), -10.0
    ).sum()
    assert abs(by_loss - by_accuracy) > 1
    np.testing.assert_allclose(
        env.gatherer.experiences[0].moments[:, 0], [by_accuracy, by_loss]
    )


@pytest.mark.parametrize("lasts", [1, 3])
def test_worlds_end_in_turn_and_their_experience_with_them(lasts: int) -> None:
    law = SimParams(
        worth_std=3.0, unknown=2.0, reliance=5.0, world_envs=2, world_episodes=lasts
    )
    env = hosts(law, n_envs=6, length=10)
    alone = controller("none", env)
    for episode in range(5):
        play_round(env, alone)
        worth = env.backend.worth
        for world in range(3):
            age = (episode + world) % lasts
            assert env.gatherer.experiences[world].episodes == 2 * (
                min(age, episode) + 1
            )
            np.testing.assert_array_equal(
                worth[2 * world], worth[2 * world + 1]
            )  # hosts of a world are alike
        assert (worth[0] != worth[2]).all()


def test_the_gain_of_a_host_that_leans_on_a_seed_that_is_not_kept_is_left_out() -> None:
    """The accuracy that the committed network lost with that seed says nothing about kept seeds; trials do."""
    env = hosts(n_envs=4)
    env.reset(seed=0)
    slots, ended, gains = env.state.slots, np.ones(4, dtype=np.bool_), np.ones((4, 2))
    slots.blueprint[:], slots.stage[:], slots.alpha[:] = 1, S.FOSSILIZED, 1.0
    slots.stage[1, 2], slots.stage[2, 2], slots.stage[3, 2] = (
        S.HOLDING,
        S.BLENDING,
        S.TRAINING,
    )
    slots.alpha[3, 2] = 0.0
    slots.trial[:] = 0.5
    env.gatherer.watch(slots)
    env.gatherer.end(ended, gains, slots)
    experience = env.gatherer.experiences[0]
    assert (
        experience.episodes == 2
    )  # the first, and the last, whose third seed is isolated
    assert experience.counts[0].sum() == slots.trial.size  # of all


def test_a_contribution_counts_while_alpha_stands_still() -> None:
    """A seed that fades contributes less and less: its last measurement says nothing about its worth."""
    env = hosts(n_envs=3)
    env.reset(seed=0)
    slots = env.state.slots
    slots.blueprint[:], slots.stage[:], slots.alpha[:], slots.contribution[:] = (
        1,
        S.HOLDING,
        1.0,
        4.0,
    )
    env.gatherer.watch(slots)
    slots.contribution[:] = 0.25
    slots.fading[0], slots.alpha_steps[1] = True, 3
    env.gatherer.watch(slots)
    np.testing.assert_array_equal(env.gatherer.contributions[:, 0, 1], [4.0, 4.0, 0.25])
