"""The Gymnasium API: shapes, resets, idle envs, and ownership of arrays."""

from typing import Any

import numpy as np
import pytest

from esper.agents.controller import RandomController
from esper.config import ConfigError
from esper.core.stage import SeedStage
from esper.env.vector_env import GrowthVectorEnv
from esper.telemetry.event import BaselineMeasured, EpisodeCompleted, EpochCompleted
from esper.telemetry.record import stable_record
from tests.core_helpers import (
    Rig,
    digits,
    flat_baseline,
    rig,
    same_bits,
    tensors_of,
    tiny_config,
)

S = SeedStage


def controller(world: Rig, seed: int = 3) -> RandomController:
    made = RandomController(
        world.env.action_spec, world.env.layout, world.env.num_envs, seed
    )
    made.begin()
    return made


def play(world: Rig, steps: int, seed: int = 3) -> list[tuple[Any, ...]]:
    """Random play: observation, reward and weights of env 0, from the reset on."""
    chooser = controller(world, seed)
    seen: list[tuple[Any, ...]] = [
        (world.observation[0].copy(), 0.0, tensors_of(world.training()))
    ]
    for _ in range(steps):
        actions = chooser.act(world.observation, world.info["action_mask"])
        world.step(dict(enumerate(actions)))
        seen.append(
            (
                world.observation[0].copy(),
                float(world.rewards[0]),
                tensors_of(world.training()),
            )
        )
    return seen


def same_play(first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]) -> None:
    assert len(first) == len(second)
    for (o1, r1, w1), (o2, r2, w2) in zip(first, second, strict=True):
        np.testing.assert_array_equal(o1, o2)
        assert r1 == r2
        same_bits(w1, w2)


def test_an_episode_terminates_at_its_horizon_and_the_env_idles_with_no_reward() -> (
    None
):
    with rig(n_envs=2, horizon=2) as world:
        world.step()
        assert world.terminated.tolist() == [False, False]
        assert world.info["idle"].tolist() == [False, False]
        world.step()
        assert world.terminated.tolist() == [True, True]
        assert world.truncated.tolist() == [False, False]
        assert world.info["idle"].tolist() == [False, False]
        last = world.observation.copy()
        events = len(world.events)
        world.step()
        assert world.info["idle"].tolist() == [True, True]
        assert world.terminated.tolist() == [True, True]
        assert world.rewards.tolist() == [0, 0]
        assert np.array_equal(world.observation, last)
        assert len(world.events) == events


def test_an_idle_envs_illegal_action_is_not_counted() -> None:
    with rig(horizon=1) as world:
        world.step()
        world.do("FOSSILIZE", "r0c0")
        assert world.info["illegal_actions"].tolist() == [0]


def test_a_reset_mask_restarts_only_the_chosen_envs() -> None:
    with rig(n_envs=3, horizon=5) as world, rig(n_envs=3, horizon=5) as reference:
        for each in (world, reference):
            each.step()
            each.step()
        mask = np.array([False, True, False])
        world.reset(options={"reset_mask": mask})
        assert mask.tolist() == [False, True, False]
        assert [t.epoch for t in world.env.training] == [2, 0, 2]
        assert [t.episode for t in world.env.training] == [0, 1, 0]
        for index in (0, 2):
            assert np.array_equal(
                world.observation[index], reference.observation[index]
            )
        world.step()
        reference.step()
        for index in (0, 2):
            assert np.array_equal(
                world.observation[index], reference.observation[index]
            )
            same_bits(
                tensors_of(world.training(index)), tensors_of(reference.training(index))
            )
        assert world.info["idle"].tolist() == [False] * 3


@pytest.mark.finding("T1")
def test_one_env_for_one_epoch() -> None:
    with rig(n_envs=1, horizon=1) as world:
        world.do("GERMINATE", "r0c0", "norm")
        assert world.terminated.tolist() == [True]
        assert len(world.of_kind(EpochCompleted)) == 1
        assert len(world.of_kind(EpisodeCompleted)) == 1


@pytest.mark.trap(10)
def test_seeds_pass_their_gates_without_any_sink() -> None:
    """Gates read gradients, which are measured whether or not a sink listens."""
    gates = {
        "min_training_epochs": 1,
        "min_gradient_health": 0.5,
        "trial_standard_errors": 1000.0,
    }
    worlds = [rig(horizon=12, env={"gates": gates}) for _ in range(3)]
    with worlds[0] as heard, worlds[1] as deaf, worlds[2] as mute:
        deaf.events.clear()
        deaf.env.emit = lambda _event: None
        mute.env.loop.reporter = (
            None  # as in an env that is made without anyone to tell
        )
        for world in (heard, deaf, mute):
            world.grow("r0c0", SeedStage.HOLDING)
            assert (world.slot("r0c0").gradient_health or 0) >= 0.5
        assert heard.events
        assert not deaf.events
        for silent in (deaf, mute):
            assert np.array_equal(heard.observation, silent.observation)
            same_bits(
                tensors_of(heard.training(), ("r0c0",)),
                tensors_of(silent.training(), ("r0c0",)),
            )


@pytest.mark.trap(11)
def test_env_0_does_not_depend_on_how_many_envs_there_are() -> None:
    with rig(n_envs=1, horizon=8) as one, rig(n_envs=3, horizon=8) as three:
        same_play(play(one, 8), play(three, 8))


def test_the_number_of_workers_changes_no_bit_and_no_event() -> None:
    records = []
    for lanes in (1, 2):
        with rig(n_envs=3, horizon=6, run={"lanes": lanes}) as world:
            seen = play(world, 6)
            records.append(([stable_record(event) for event in world.events], seen))
    (events, seen), (others, again) = records
    assert events == others
    same_play(seen, again)


def test_reset_with_a_seed_reproduces_a_run_from_its_first_observation_on() -> None:
    with rig(horizon=8) as world:
        world.reset(seed=5)
        first = play(world, 8)
        world.reset(seed=5)
        second = play(world, 8)
        same_play(first[1:], second[1:])
        names = world.env.layout.entries
        differing = [
            e.name
            for e, a, b in zip(names, first[0][0], second[0][0], strict=True)
            if a != b
        ]
        assert differing == []


def test_episodes_of_a_run_differ_and_so_do_runs() -> None:
    with rig(horizon=2) as world:
        hosts = [tensors_of(world.training())["host.parameter.0"]]
        world.reset()
        hosts.append(tensors_of(world.training())["host.parameter.0"])
        world.reset(seed=1)
        hosts.append(tensors_of(world.training())["host.parameter.0"])
        assert not any(
            bool((a == b).all())
            for a, b in [
                (hosts[0], hosts[1]),
                (hosts[0], hosts[2]),
                (hosts[1], hosts[2]),
            ]
        )


def test_the_baseline_is_measured_once_when_none_is_given() -> None:
    events: list[Any] = []
    config = tiny_config(
        horizon=3, env={"n_envs": 1, "episode_length": 3, "baseline_episodes": 2}
    )
    env = GrowthVectorEnv(digits(), config, emit=events.append)
    env.reset()
    env.reset()
    env.close()
    (measured,) = [event for event in events if isinstance(event, BaselineMeasured)]
    assert measured.episodes == 2
    assert len(measured.accuracy) == len(measured.loss) == 4
    assert measured.final_loss_std > 0


def test_a_baseline_of_another_horizon_is_refused() -> None:
    env = GrowthVectorEnv(digits(), tiny_config(horizon=4), baseline=flat_baseline(5))
    with pytest.raises(ValueError, match="the baseline has 5 epochs, the episode 4"):
        env.reset()
    env.close()


@pytest.mark.trap(12)
def test_a_batch_larger_than_an_epoch_is_refused_before_training() -> None:
    config = tiny_config(task={"samples_per_epoch": 16, "batch_size": 32})
    with pytest.raises(ConfigError, match="larger than the 16 samples"):
        GrowthVectorEnv(digits(), config)


def test_test_accuracy_is_of_the_committed_network_and_changes_nothing() -> None:
    with rig(n_envs=2, horizon=6) as world:
        world.grow("r0c0", S.HOLDING)
        before = tensors_of(world.training(), ("r0c0",))
        training = world.training()
        training.host.eval()
        logits = training.host(digits().test.x)
        training.host.train()
        expected = 100 * float((logits.argmax(1) == digits().test.y).double().mean())
        assert world.env.test_accuracy()[0] == pytest.approx(expected)
        same_bits(before, tensors_of(world.training(), ("r0c0",)))
        assert training.host.training


@pytest.mark.finding("L6")
def test_all_envs_count_in_one_block_each_in_a_row_of_its_own() -> None:
    with rig(n_envs=3) as world:
        rows = [world.training(i).totals.training for i in range(3)]
        assert len({row.untyped_storage().data_ptr() for row in rows}) == 1
        assert len({row.data_ptr() for row in rows}) == 3
        world.step()
        assert [float(row[2]) for row in rows] == [64.0] * 3
