"""Playing one round: an episode in every env, by one controller."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
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


def play_round(env: SlotVectorEnv, player: Player, seed: int | None = None, learner: PPOAgent | None = None) -> Played:
    """Reset all envs and let the player act until every episode has ended.

    Args:
        seed: sets the run seed; None goes on to each env's next episode.
        learner: is told what came of every step; give the player here, too, when it is one that learns.
    """
    start = time.perf_counter()
    observation, info = env.reset(seed=seed)
    player.begin()
    returns, discount = np.zeros(env.num_envs), 1.0
    done = info["idle"]
    while not done.all():
        with env.spans("act"):
            actions = player.act(observation, info["action_mask"])
        observation, rewards, terminated, truncated, info = env.step(actions)
        if learner is not None:
            governed = info["reward_terms"]["governor"]
            learner.record(rewards, governed, terminated, truncated, info["idle"], observation)
        returns += discount * rewards
        discount *= env.config.reward.gamma
        done = terminated | truncated
    grown = env.grown()
    return Played(
        committed=info["committed_accuracy"],
        baseline=info["baseline_accuracy"],
        returns=returns,
        parameters=grown.parameters,
        fossils=grown.fossils,
        epochs=grown.epochs,
        rollbacks=grown.rollbacks,
        illegal_actions=info["illegal_actions"].astype(np.float64),
        observation=observation,
        seconds=time.perf_counter() - start,
    )
