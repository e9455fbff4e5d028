"""A rollout: one episode in every env, played by one controller, which can stop and resume between any two steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.agents.controller import Controller, log_prob_of
from esper.agents.ppo.agent import PPOAgent
from esper.env.slot_env import SlotVectorEnv

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class EpisodeStats:
    """Results of a rollout, one value per env [E].

    Accuracies are in pp, on the validation split. ``observation`` [E, size] follows the last step. ``seconds`` are
    those spent on the rollout, excluding pauses between its steps.
    """

    committed: Floats
    """Accuracy of the committed network."""
    baseline: Floats
    """Final accuracy of the no-growth baseline."""
    returns: Floats
    """Discounted return, Σ γ^t r_t; without the discount, the potential terms of an episode would not cancel."""
    parameters: Floats
    """Number of parameters of the committed network."""
    fossils: Floats
    epochs: Floats
    rollbacks: Floats
    illegal_actions: Floats
    observation: NDArray[np.float32]
    seconds: float


class Rollout:
    """One episode in every env; it can be played again from :meth:`begin`.

    Args:
        learner: records the result of every step; an agent that learns must be passed here as well.
    """

    def __init__(
        self,
        env: SlotVectorEnv,
        controller: Controller,
        learner: PPOAgent | None = None,
    ) -> None:
        self.env = env
        self.controller = controller
        self.learner = learner
        self.begun = False

    def begin(self, seed: int | None = None) -> None:
        """Resets all envs; ``seed`` sets the run seed, None advances each env to its next episode."""
        start = time.perf_counter()
        observation, info = self.env.reset(seed=seed)
        self.observation = observation
        self.info = info
        self.controller.begin()
        self.returns = np.zeros(self.env.num_envs)
        self.discount = 1.0
        self.done = self.info["idle"]
        self.steps = 0
        self.begun = True
        self.seconds = time.perf_counter() - start

    @property
    def over(self) -> bool:
        return bool(self.done.all())

    def step(self) -> None:
        """Performs one step of every env."""
        start = time.perf_counter()
        env = self.env
        with env.spans("act"):
            actions = self.controller.act(self.observation, self.info["action_mask"])
        if env.loop.reporter is not None:  # it reports the actions while the env steps
            env.loop.reporter.expect(log_prob_of(self.controller, env.num_envs))
        observation, rewards, terminated, truncated, info = env.step(actions)
        self.observation = observation
        self.info = info
        if self.learner is not None:
            self.learner.record(
                rewards,
                info["reward_terms"]["governor"],
                terminated,
                truncated,
                info["idle"],
                observation,
            )
        self.returns += self.discount * rewards
        self.discount *= env.config.reward.gamma
        self.done = terminated | truncated
        self.steps += 1
        self.seconds += time.perf_counter() - start

    def stats(self) -> EpisodeStats:
        """Returns the results; call it once the rollout is over."""
        state = self.env.state
        parameters = self.env.host_parameters + state.slots.fossil_parameters
        return EpisodeStats(
            committed=self.info["committed_accuracy"],
            baseline=self.info["baseline_accuracy"],
            returns=self.returns,
            parameters=parameters.astype(np.float64),
            fossils=state.slots.fossil.sum(axis=1).astype(np.float64),
            epochs=state.epoch.astype(np.float64),
            rollbacks=state.rollbacks.astype(np.float64),
            illegal_actions=self.info["illegal_actions"].astype(np.float64),
            observation=self.observation,
            seconds=self.seconds,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to resume, except what the agent has learned and its rollout buffer."""
        return {
            "env": self.env.state_dict(),
            "controller": self.controller.memory_state(),
            "returns": torch.tensor(self.returns),
            "discount": self.discount,
            "done": torch.tensor(self.done),
            "seconds": self.seconds,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``; call it instead of :meth:`begin`."""
        observation, info = self.env.load_state_dict(state["env"])
        self.observation = observation
        self.info = info
        self.controller.load_memory_state(state["controller"])
        self.returns = state["returns"].numpy().copy()
        self.discount = state["discount"]
        self.done = state["done"].numpy().copy()
        self.seconds = state["seconds"]  # pauses do not count
        self.steps = state["steps"]
        self.begun = True


def play_round(
    env: SlotVectorEnv,
    controller: Controller,
    seed: int | None = None,
    learner: PPOAgent | None = None,
) -> EpisodeStats:
    """Resets all envs and plays until every episode has ended; arguments as in :class:`Rollout` and its ``begin``."""
    rollout = Rollout(env, controller, learner)
    rollout.begin(seed)
    while not rollout.over:
        rollout.step()
    return rollout.stats()
