"""Playing one round: an episode in every env, by one controller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.control.controller import Controller
from esper.env.vector_env import GrowthVectorEnv

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Played:
    """The end of one round, one value an env; accuracies pp, of committed networks except where said."""

    test: Floats
    committed: Floats
    """On the validation split."""
    baseline: Floats
    """No-growth baseline at the end, validation split."""
    returns: Floats
    """Undiscounted sums of rewards."""
    parameters: Floats
    """Of the committed network."""
    fossils: Floats
    epochs: Floats
    rollbacks: Floats
    illegal_actions: Floats


def play_round(env: GrowthVectorEnv, controller: Controller, seed: int | None = None) -> Played:
    """Reset all envs, let the controller act until every episode has ended, and measure what is kept.

    ``seed`` sets the run seed; None goes on to each env's next episode.
    """
    observation, info = env.reset(seed=seed)
    controller.begin()
    returns = np.zeros(env.num_envs)
    done = info["idle"]
    while not done.all():
        actions = controller.act(observation, info["action_mask"])
        observation, rewards, terminated, truncated, info = env.step(actions)
        returns += rewards
        done = terminated | truncated
    training = env.training
    return Played(
        test=env.test_accuracy(),
        committed=info["committed_accuracy"],
        baseline=info["baseline_accuracy"],
        returns=returns,
        parameters=np.array([t.host_parameters + t.fossil_parameters for t in training], dtype=np.float64),
        fossils=np.array([len(t.fossils()) for t in training], dtype=np.float64),
        epochs=np.array([t.epoch for t in training], dtype=np.float64),
        rollbacks=np.array([e.governor.rollbacks for e in env.episodes], dtype=np.float64),
        illegal_actions=info["illegal_actions"].astype(np.float64),
    )
