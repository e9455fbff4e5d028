"""Rounds of a run: the order of rollouts and steps, interrupts, and state between steps."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from esper.agents.make import controller_for
from esper.config import TrainingConfig
from esper.env.planted import PlantedVectorEnv
from esper.run.rollout import Collector, Rollout, play_round

HORIZON = 5


def rollout_of(controller: str = "random") -> Rollout:
    config = TrainingConfig.parse(
        {"task": {"name": "planted"}, "env": {"n_envs": 3, "episode_length": HORIZON}}
    )
    env = PlantedVectorEnv(config)
    env.prepare()
    return Rollout(env, controller_for(controller, config, env, run_seed=0))


def collector(
    between_steps: Callable[[], None] = lambda: None, control: bool = False
) -> Collector:
    return Collector(
        rollout_of(), rollout_of("none") if control else None, between_steps
    )


def test_a_round_is_one_episode_of_the_controller_and_then_of_the_control() -> None:
    order: list[tuple[int, int]] = []
    made = collector(
        lambda: order.append((len(made.running), made.running[-1].epochs)), control=True
    )
    for number, env in enumerate(made.envs):
        env.test_accuracy = partial(np.full, 3, float(number))  # type: ignore[method-assign]
    played = made.play()
    assert order == [(which, step) for which in (1, 2) for step in range(HORIZON)]
    assert played.stats.epochs.tolist() == [HORIZON] * 3
    assert [accuracies.tolist() for accuracies in played.tests] == [
        [0, 0, 0],
        [1, 1, 1],
    ]


def test_the_next_round_begins_only_after_the_last_one_was_used() -> None:
    made = collector()
    first = made.play().stats.returns.copy()
    np.testing.assert_array_equal(made.play().stats.returns, first)
    assert made.envs[0].state.episode.tolist() == [0, 0, 0]
    made.finish()
    assert (made.play().stats.returns != first).any()
    assert made.envs[0].state.episode.tolist() == [1, 1, 1]


def test_without_a_control_no_test_accuracy_is_measured() -> None:
    played = collector().play()
    assert played.tests == ()


def test_an_interrupt_takes_effect_at_the_end_of_a_step_and_the_rest_is_played_later() -> (
    None
):
    made, whole = collector(), rollout_of()
    inner, steps = made.rollouts[0].env.step, []

    def step(actions: np.ndarray) -> object:
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        steps.append(made.consistent)
        return inner(actions)

    made.rollouts[0].env.step = step  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        made.play()
    assert steps == [False] * 3
    assert made.consistent
    assert made.rollouts[0].epochs == 3
    np.testing.assert_array_equal(
        made.play().stats.returns, play_round(whole.env, whole.controller).returns
    )


def test_an_error_within_a_step_leaves_a_state_that_is_not_saved() -> None:
    made = collector()

    def fail(_actions: np.ndarray) -> object:
        raise OSError("no data")

    made.rollouts[0].env.step = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(OSError, match="no data"):
        made.play()
    assert not made.consistent


def test_a_round_goes_on_from_saved_state_to_the_same_results() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        if made.rollouts[0].epochs == 3:
            raise Stop

    made, other = collector(stop, control=True), collector(control=True)
    with pytest.raises(Stop):
        made.play()
    state = made.state_dict()
    assert len(state["rollouts"]) == 1
    other.load_state_dict(state)
    assert [rollout.epochs for rollout in other.running] == [3]
    whole, resumed = collector(control=True).play(), other.play()
    np.testing.assert_array_equal(resumed.stats.returns, whole.stats.returns)
    np.testing.assert_array_equal(resumed.tests, whole.tests)
