"""Playing one round, an episode in every env, by one controller: step by step, so that it can be stopped in between."""

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
    """Controllers, policies, and agents that learn."""

    episode: NDArray[np.int64]
    """[E]: number of the episode that each env plays."""

    def begin(self) -> None: ...

    def act(self, observation: NDArray[np.float32], masks: Mapping[str, NDArray[np.bool_]]) -> NDArray[np.int64]: ...

    def memory_state(self) -> dict[str, Any]: ...

    def load_memory_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Played:
    """The end of one round, one value an env; accuracies pp, validation split."""

    committed: Floats
    """Of the committed network."""
    baseline: Floats
    """Of the no-growth baseline at the end."""
    returns: Floats
    """Σ γ^t r_t: only discounted do the potential terms of an episode cancel."""
    parameters: Floats
    """Of the committed network."""
    fossils: Floats
    epochs: Floats
    rollbacks: Floats
    illegal_actions: Floats
    observation: NDArray[np.float32]
    """[E, size]: the state that the round ended in."""
    seconds: float


class Game:
    """An episode in every env; between two steps it can be written down, and gone on with in another process.

    Args:
        learner: is told what came of every step; give the player here, too, when it is one that learns.
    """

    def __init__(self, env: SlotVectorEnv, player: Player, learner: PPOAgent | None = None) -> None:
        self.env, self.player, self.learner = env, player, learner
        self.returns, self.discount = np.zeros(env.num_envs), 1.0
        self.done = np.zeros(env.num_envs, dtype=np.bool_)
        self.seconds = 0.0
        self.steps = 0

    def begin(self, seed: int | None = None) -> None:
        """Reset all envs; ``seed`` sets the run seed, None goes on to each env's next episode."""
        start = time.perf_counter()
        self.observation, self.info = self.env.reset(seed=seed)
        self.player.begin()
        self.done = self.info["idle"]
        self.seconds += time.perf_counter() - start

    @property
    def over(self) -> bool:
        """Every episode has ended."""
        return bool(self.done.all())

    def step(self) -> None:
        """One step of every env."""
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
        """What came of it, once it is over."""
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
        """Everything that the steps to come depend on, but what has been learned and what is stored to learn from."""
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
        """Go on from ``state`` in place of :meth:`begin`."""
        self.observation, self.info = self.env.load_state_dict(state["env"])
        self.player.load_memory_state(state["player"])
        self.returns, self.discount = state["returns"].numpy().copy(), state["discount"]
        self.done, self.seconds, self.steps = state["done"].numpy().copy(), state["seconds"], state["steps"]


def play_round(env: SlotVectorEnv, player: Player, seed: int | None = None, learner: PPOAgent | None = None) -> Played:
    """Reset all envs and let the player act until every episode has ended; arguments as for :class:`Game`."""
    game = Game(env, player, learner)
    game.begin(seed)
    while not game.over:
        game.step()
    return game.end()
