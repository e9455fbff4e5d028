"""PPO on the planted task: it leaves chance behind, and comes close to the best return there is."""

import numpy as np
import pytest

from esper.config import PPOConfig
from esper.env.planted import PlantedVectorEnv
from esper.experiment.planted_score import discounted_returns, planted_scale
from esper.ppo.agent import PPOAgent

# Much exploration at first: where every op is as likely as any other a seed is soon pruned again, and an agent that
# settles early settles on waiting.
SETTINGS = PPOConfig(
    learning_rate=1.5e-3,
    entropy_start=0.3,
    entropy_end=0.01,
    update_epochs=3,
    target_kl=0.03,
    gae_lambda=0.97,
)
HELD_OUT = 999


def train(env_steps: int, seed: int) -> tuple[PlantedVectorEnv, PPOAgent]:
    """An agent trained for so many env steps, in rounds of one episode in each env."""
    env = PlantedVectorEnv()
    agent = PPOAgent(env.action_spec, env.layout, env.num_envs, SETTINGS, run_seed=seed)
    rounds = env_steps // (env.num_envs * env.horizon)
    idle = np.zeros(env.num_envs, dtype=np.bool_)
    for number in range(rounds):
        agent.progress = number / rounds
        observation, info = env.reset(seed=None if number else seed)
        agent.begin()
        while not env.done.all():
            action = agent.act(observation, info["action_mask"], store=True)
            observation, rewards, terminated, truncated, info = env.step(action)
            agent.record(rewards, info["reward_terms"]["governor"], terminated, truncated, idle)
        agent.learn(observation)
    return env, agent


@pytest.mark.slow
def test_ppo_comes_close_to_the_best_return() -> None:
    env, agent = train(env_steps=300_000, seed=0)
    reached = float(discounted_returns(env, agent, HELD_OUT).mean())
    score = planted_scale().score(reached)
    print(f"return {reached:.3f}, score {score:.3f}")
    assert score > 0.8
