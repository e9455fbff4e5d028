"""A policy learned on one host plays hosts with more or fewer slots, and with other blueprints."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from esper.agents.ppo.agent import PPOAgent
from esper.agents.ppo.policy import Policy
from esper.config import PPOConfig, TrainingConfig
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.run.rollout import EpisodeStats, play_round
from tests.agents.ppo.toy import replayed_log_probs

FOUR = ("moss", "fern", "oak", "ivy")
SETTINGS = PPOConfig(width=32, update_epochs=1, n_minibatches=2)


def planted(
    slots: int, blueprints: Sequence[str] = FOUR, n_envs: int = 8
) -> PlantedVectorEnv:
    """Hosts of ten epochs whose slots are all alike."""
    config = TrainingConfig.parse({"env": {"n_envs": n_envs, "episode_length": 10}})
    law = SimParams(
        slots=tuple(f"r{i // 2}c{i % 2}" for i in range(slots)),
        blueprints=tuple(blueprints),
        worth=(tuple(float(3 + i) for i in range(len(blueprints))),) * slots,
        parameters=(100,) * len(blueprints),
    )
    return PlantedVectorEnv(config, law)


def make_agent(env: PlantedVectorEnv, run_seed: int = 0) -> PPOAgent:
    return PPOAgent(env.action_spec, env.layout, env.num_envs, SETTINGS, run_seed)


@pytest.fixture(scope="module")
def trained() -> PPOAgent:
    """It learned a little from hosts with four slots."""
    env = planted(4)
    agent = make_agent(env)
    for number in range(3):
        agent.update(
            play_round(
                env, agent, seed=None if number else 1, learner=agent
            ).observation
        )
    return agent


def moved(trained: PPOAgent, env: PlantedVectorEnv, greedy: bool = False) -> Policy:
    policy = Policy(
        env.action_spec, env.layout, env.num_envs, SETTINGS, run_seed=5, greedy=greedy
    )
    policy.load_policy_state(trained.policy_state())
    return policy


OTHERS = [
    (2, FOUR, True),
    (1, ("oak",), False),
    (3, ("fern", "reed", "moss"), True),
    (6, ("ivy", "reed", "moss", "fern", "oak", "rush"), False),
]


@pytest.mark.parametrize(("slots", "blueprints", "greedy"), OTHERS)
def test_a_policy_plays_hosts_with_other_slots_and_blueprints(
    slots: int, blueprints: Sequence[str], greedy: bool, trained: PPOAgent
) -> None:
    def play() -> EpisodeStats:
        env = planted(slots, blueprints)
        return play_round(env, moved(trained, env, greedy), seed=9)

    first, again = play(), play()
    np.testing.assert_array_equal(first.returns, again.returns)
    assert np.isfinite(first.returns).all()
    assert first.illegal_actions.sum() == 0


def test_on_the_host_it_learned_from_it_acts_with_the_same_bits(
    trained: PPOAgent,
) -> None:
    """This holds for the policy by itself, and in an agent that loaded it."""
    env = planted(4)
    observation, info = env.reset(seed=2)
    other = make_agent(env, run_seed=7)
    other.load_policy_state(trained.policy_state())
    decisions = []
    for policy in (
        trained.clone_policy(8, 7),
        other.clone_policy(8, 7),
    ):
        policy.begin()
        seen, context, decision = policy.step(
            torch.from_numpy(observation), policy.legal(info["action_mask"])
        )
        decisions.append((seen, context, decision.action, decision.log_prob))
    assert all(torch.equal(a, b) for a, b in zip(*decisions, strict=True))


def test_an_agent_continues_to_learn_on_another_host(trained: PPOAgent) -> None:
    """Replay reproduces its log-probabilities there, too."""
    env = planted(6, (*FOUR, "reed"))
    agent = make_agent(env)
    agent.load_policy_state(trained.policy_state())
    for _ in range(2):
        played = play_round(env, agent, seed=4, learner=agent)
        then, now = replayed_log_probs(agent)
        torch.testing.assert_close(then, now, atol=1e-5, rtol=0)
        before = agent.network.trunk[0].weight.detach().clone()
        agent.update(played.observation)
    assert not torch.equal(before, agent.network.trunk[0].weight)


def test_a_blueprint_is_known_by_what_describes_it_and_not_by_its_name(
    trained: PPOAgent,
) -> None:
    """Renamed blueprints are planted as before."""
    env, renamed = planted(4), planted(4, ("a", "b", "c", "d"))
    observation, info = env.reset(seed=3)
    chosen = []
    for each in (env, renamed):
        policy = moved(trained, each)
        policy.begin()
        chosen.append(policy.act(observation, info["action_mask"]))
    np.testing.assert_array_equal(*chosen)
