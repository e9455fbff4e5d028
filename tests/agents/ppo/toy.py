"""A toy env behind the same spaces as the real ones, and an agent that plays it."""

from functools import cache

import numpy as np
import torch

from esper.agents.ppo.agent import PPOAgent
from esper.agents.ppo.update import UpdateStats
from esper.config import PPOConfig
from esper.core.action import HEADS, ActionSpec, Op
from esper.core.observation import KINDS, ObservationLayout

SPEC = ActionSpec(("r0c0", "r0c1", "r1c0"), ("first", "second", "third", "fourth"))
LAYOUT = ObservationLayout(SPEC.slots, SPEC.blueprints, horizon=6)
NOTHING = np.zeros(4, dtype=np.bool_)


class Toy:
    """Each step, one slot is marked by its alpha: planting there a blueprint that depends on the slot pays 1, anything
    else nothing. Blueprints differ by what they are built of. Some steps allow WAIT only."""

    def __init__(self, envs: int, seed: int = 0, length: int = 6) -> None:
        self.envs, self.length = envs, length
        self.draw = np.random.default_rng(seed)
        self.alpha = [LAYOUT.index[f"{slot}/alpha"] for slot in SPEC.slots]

    def observe(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        observation = (
            self.draw.normal(size=(self.envs, LAYOUT.size)).astype(np.float32) * 0.1
        )
        for slot in SPEC.slots:
            observation[:, LAYOUT.index[f"{slot}/blueprint"]] = self.draw.integers(
                0, 5, size=self.envs
            )
            for place, name in enumerate(SPEC.blueprints):
                for i, kind in enumerate(KINDS):
                    observation[:, LAYOUT.index[f"{slot}/{name}/{kind}"]] = float(
                        i == place
                    )
        self.target = self.draw.integers(0, 3, size=self.envs)
        observation[:, self.alpha] = np.eye(3)[self.target]
        op_slot = np.ones((self.envs, len(Op), 3), dtype=np.bool_)
        op_slot[self.draw.random(self.envs) < 0.2, 1:] = False
        masks = {
            head: np.ones((self.envs, n), dtype=np.bool_)
            for head, n in zip(HEADS, SPEC.sizes, strict=True)
        }
        masks |= {"op": op_slot.any(axis=2), "op_slot": op_slot}
        masks["slot_blueprint"] = self.draw.random((self.envs, 3, 4)) < 0.8
        masks["slot_blueprint"][:, :, :3] |= np.eye(
            3, dtype=np.bool_
        )  # what pays is always affordable
        return observation, masks

    def reward(self, action: np.ndarray) -> np.ndarray:
        paid = (
            (action[:, 0] == Op.GERMINATE)
            & (action[:, 1] == self.target)
            & (action[:, 2] == self.target)
        )
        return paid.astype(np.float64)


def play(agent: PPOAgent, toy: Toy, steps: int) -> tuple[float, np.ndarray]:
    """Steps of the toy, stored; the mean reward and the last observation."""
    agent.begin()
    observation, masks = toy.observe()
    total = 0.0
    for step in range(steps):
        action = agent.act(observation, masks)
        rewards = toy.reward(action)
        total += rewards.mean() / steps
        ended = np.full(toy.envs, (step + 1) % toy.length == 0)
        observation, masks = toy.observe()
        none = np.zeros(toy.envs, dtype=np.bool_)
        agent.record(rewards, np.zeros(toy.envs), ended, none, none, ~none)
        if ended.any():
            agent.begin(ended)
    return total, observation


def make_agent(envs: int = 4, **settings: float) -> PPOAgent:
    return PPOAgent(SPEC, LAYOUT, envs, PPOConfig(width=32, **settings), run_seed=3)


@cache
def learned_well() -> tuple[list[float], list[UpdateStats]]:
    """Mean rewards of 37 rollouts of an agent that learns well, and the updates between them."""
    agent, toy = (
        # What a prior prefers does not pay here.
        make_agent(32, learning_rate=3e-3, anneal=False, entropy_start=0.01, prior=0.0),
        Toy(32),
    )
    reward, last = play(agent, toy, steps=12)
    rewards, updates = [reward], []
    for _ in range(36):
        updates.append(agent.update(last))
        reward, last = play(agent, toy, steps=12)
        rewards.append(reward)
    return rewards, updates


def replayed_log_probs(agent: PPOAgent) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored and the replayed joint log-probabilities [T, E] of the steps in the agent's buffer."""
    rollout, masks, state = agent.buffer.stack()
    with torch.no_grad():
        now = agent._evaluate(rollout, masks, state, torch.arange(agent.n_envs))
    return rollout["log_prob"], now.log_prob
