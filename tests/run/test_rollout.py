"""A rollout hands the log-probabilities of a policy's actions to the events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from esper.agents.controller import RandomController, log_prob_of
from esper.agents.heuristic import HeuristicController
from esper.agents.ppo.agent import PPOAgent
from esper.config import ConfigError, PPOConfig
from esper.run.rollout import play_round
from esper.telemetry.event import ActionTaken
from tests.core_helpers import Rig, rig, wait_actions


@pytest.fixture
def world() -> Iterator[Rig]:
    with rig(n_envs=3, horizon=5) as made:
        made.events.clear()
        yield made


def agent_of(world: Rig) -> PPOAgent:
    return PPOAgent(
        world.env.action_spec, world.env.layout, 3, PPOConfig(width=16), run_seed=1
    )


def test_events_have_the_log_probabilities_that_an_agent_stores(world: Rig) -> None:
    agent = agent_of(world)
    play_round(world.env, agent, seed=1, learner=agent)
    rollout, *_ = agent.buffer.stack()
    taken = world.of_kind(ActionTaken)
    assert len(taken) > 5
    assert len({event.log_prob for event in taken}) > 5
    for event in taken:
        assert event.log_prob == float(rollout["log_prob"][event.epoch, event.env])
        assert (
            event.op
            == world.env.action_spec.choices("op")[
                int(rollout["action"][event.epoch, event.env, 0])
            ]
        )


def test_a_greedy_policy_reports_the_probability_of_its_choice(world: Rig) -> None:
    policy = agent_of(world).clone_policy(3, 1)
    policy.begin()
    policy.act(world.observation, world.info["action_mask"])
    told = log_prob_of(policy, 3)
    assert told is not None
    assert ((told < 0) & np.isfinite(told)).all()


def test_rules_have_no_log_probability(world: Rig) -> None:
    play_round(
        world.env, RandomController(world.env.action_spec, world.env.layout, 3), seed=1
    )
    taken = world.of_kind(ActionTaken)
    assert taken
    assert all(event.log_prob is None for event in taken)


class Sure(RandomController):
    """Has log-probabilities of its own."""

    log_prob = np.log([0.5, 0.25, 0.125])


def test_any_controller_may_report_log_probabilities(world: Rig) -> None:
    play_round(world.env, Sure(world.env.action_spec, world.env.layout, 3), seed=1)
    assert all(
        event.log_prob == Sure.log_prob[event.env]
        for event in world.of_kind(ActionTaken)
    )
    assert world.of_kind(ActionTaken)


def test_log_probabilities_of_another_shape_are_refused_before_the_step(
    world: Rig,
) -> None:
    class Wrong(HeuristicController):
        log_prob = np.zeros((3, 8))

        def act(self, observation: Any, masks: Any) -> Any:
            return wait_actions(3)

    with pytest.raises(
        ConfigError, match=r"log_prob of Wrong has shape \[3, 8\]; expected \[3\]"
    ):
        play_round(world.env, Wrong(world.env.action_spec, world.env.layout, 3), seed=1)
    assert (world.env.state.epoch == 0).all()
