"""Playing one round, an episode in every env, with one controller, step by step so that it can be interrupted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from esper.env.slot_env import SlotVectorEnv
from esper.ppo.agent import PPOAgent

Floats = NDArray[np.float64]


class Player(Protocol):
    """Interface of controllers, policies and learning agents."""

    episode: NDArray[np.int64]
    """[E]: number of the episode that each env plays."""

    def begin(self) -> None: ...

    def act(self, observation: NDArray[np.float32], masks: Mapping[str, NDArray[np.bool_]]) -> NDArray[np.int64]: ...

    def memory_state(self) -> dict[str, Any]: ...

    def load_memory_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Played:
    """Results of one round, one value per env; accuracies in pp, validation split."""

    committed: Floats
    """Accuracy of the committed network."""
    baseline: Floats
    """Final accuracy of the no-growth baseline."""
    returns: Floats
    """Discounted return, Σ γ^t r_t; without the discount, the potential terms of an episode would not cancel."""
    parameters: Floats
    """Number of parameters of the committed network."""
    fossils: Floats
    """Number of seeds kept."""
    epochs: Floats
    """Epochs trained."""
    rollbacks: Floats
    illegal_actions: Floats
    observation: NDArray[np.float32]
    """[E, size]: observation after the last step."""
    seconds: float
    """Seconds spent on the round, excluding pauses between its steps."""


class Game:
    """One episode in every env; its state can be saved between two steps and resumed in another process.

    Args:
        learner: records the result of every step; a player that learns must be passed here as well.
    """

    def __init__(self, env: SlotVectorEnv, player: Player, learner: PPOAgent | None = None) -> None:
        self.env, self.player, self.learner = env, player, learner
        self.returns, self.discount = np.zeros(env.num_envs), 1.0
        self.done = np.zeros(env.num_envs, dtype=np.bool_)
        self.seconds = 0.0
        self.steps = 0

    def begin(self, seed: int | None = None) -> None:
        """Resets all envs; ``seed`` sets the run seed, None advances each env to its next episode."""
        start = time.perf_counter()
        self.observation, self.info = self.env.reset(seed=seed)
        self.player.begin()
        self.done = self.info["idle"]
        self.seconds += time.perf_counter() - start

    @property
    def over(self) -> bool:
        """Whether every episode has ended."""
        return bool(self.done.all())

    def step(self) -> None:
        """Performs one step of every env."""
        start = time.perf_counter()
        env, observation = self.env, self.observation
        with env.spans("act"):
            actions = self.player.act(observation, self.info["action_mask"])
        self.observation, rewards, terminated, truncated, self.info = env.step(actions)
        if self.learner is not None:
            governed, idle = self.info["reward_terms"]["governor"], self.info["idle"]
            self.learner.record(rewards, governed, terminated, truncated, idle, self.observation)
        self.returns += self.discount * rewards
        self.discount *= env.config.reward.gamma
        self.done = terminated | truncated
        self.steps += 1
        self.seconds += time.perf_counter() - start

    def end(self) -> Played:
        """Returns the results; call it once the game is over."""
        grown = self.env.grown()
        return Played(
            committed=self.info["committed_accuracy"],
            baseline=self.info["baseline_accuracy"],
            returns=self.returns,
            parameters=grown.parameters,
            fossils=grown.fossils,
            epochs=grown.epochs,
            rollbacks=grown.rollbacks,
            illegal_actions=self.info["illegal_actions"].astype(np.float64),
            observation=self.observation,
            seconds=self.seconds,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to resume, except what the agent has learned and its rollout buffer."""
        return {
            "env": self.env.state_dict(),
            "player": self.player.memory_state(),
            "returns": torch.tensor(self.returns),
            "discount": self.discount,
            "done": torch.tensor(self.done),
            "seconds": self.seconds,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``; call it instead of :meth:`begin`."""
        self.observation, self.info = self.env.load_state_dict(state["env"])
        self.player.load_memory_state(state["player"])
        self.returns, self.discount = state["returns"].numpy().copy(), state["discount"]
        self.done, self.seconds, self.steps = state["done"].numpy().copy(), state["seconds"], state["steps"]


def play_round(env: SlotVectorEnv, player: Player, seed: int | None = None, learner: PPOAgent | None = None) -> Played:
    """Resets all envs and plays until every episode has ended; arguments as in :class:`Game` and :meth:`Game.begin`."""
    game = Game(env, player, learner)
    game.begin(seed)
    while not game.over:
        game.step()
    return game.end()
