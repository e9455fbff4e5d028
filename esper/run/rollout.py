"""Rollouts, one episode in every env, and rounds of them, which can stop and resume between any two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.agents.controller import Controller, log_prob_of
from esper.agents.ppo.agent import PPOAgent
from esper.core.slots import mean_need
from esper.env.slot_env import SlotVectorEnv
from esper.ops.torch_state import training_state
from esper.run.interrupt import interrupts_wait

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
    """Discounted return, Σ γ^t r_t after t epochs; without the discount, the potential terms of an episode would not
    cancel."""
    parameters: Floats
    """Number of parameters of the committed network."""
    fossils: Floats
    epochs: Floats
    rollbacks: Floats
    illegal_actions: Floats
    need: float | None
    """Mean of the needs of vacant slots that were measured last; None if none were."""
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
        self.discount = np.ones(self.env.num_envs)
        self.done = self.info["idle"]
        self.begun = True
        self.seconds = time.perf_counter() - start

    @property
    def over(self) -> bool:
        return bool(self.done.all())

    @property
    def epochs(self) -> int:
        """Number of epochs that have been trained in the env that has the most of them."""
        return int(self.env.state.epoch.max())

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
                info["trained"],
                observation,
            )
        self.returns += self.discount * rewards
        # No time passes in a step that trains nothing.
        gamma = env.config.reward.gamma
        self.discount *= np.where(info["trained"], gamma, 1.0)
        self.done = terminated | truncated
        self.seconds += time.perf_counter() - start

    def stats(self) -> EpisodeStats:
        """Returns the results; call it once the rollout is over."""
        state = self.env.state
        parameters = self.env.first_parameters + state.slots.fossil_parameters
        return EpisodeStats(
            committed=self.info["committed_accuracy"],
            baseline=self.info["baseline_accuracy"],
            returns=self.returns,
            parameters=parameters.astype(np.float64),
            fossils=state.slots.kept.astype(np.float64),
            epochs=state.epoch.astype(np.float64),
            rollbacks=state.rollbacks.astype(np.float64),
            illegal_actions=self.info["illegal_actions"].astype(np.float64),
            need=mean_need(state.slots),
            observation=self.observation,
            seconds=self.seconds,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to resume, except what the agent has learned and its rollout buffer."""
        return {
            "env": self.env.state_dict(),
            "controller": self.controller.memory_state(),
            "returns": torch.tensor(self.returns),
            "discount": torch.tensor(self.discount),
            "done": torch.tensor(self.done),
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``; call it instead of :meth:`begin`."""
        observation, info = self.env.load_state_dict(state["env"])
        self.observation = observation
        self.info = info
        self.controller.load_memory_state(state["controller"])
        self.returns = state["returns"].numpy().copy()
        self.discount = state["discount"].numpy().copy()
        self.done = state["done"].numpy().copy()
        self.seconds = state["seconds"]  # pauses do not count
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


@dataclass(frozen=True)
class Round:
    """Result of one round."""

    stats: EpisodeStats
    began: float
    """``time.perf_counter()`` at the start of the round, or of its rest after resuming."""
    phases_before: dict[str, float]
    """The env's seconds by phase at that moment."""
    tests: tuple[Floats, ...] = ()
    """Test accuracies [E] of the committed networks, pp: those of the controller's envs and those of the control envs;
    empty without control envs."""


class Collector:
    """Plays the rounds of a run.

    Args:
        rollout: what the run's controller plays.
        control: the same hosts left alone, played after ``rollout`` in each round; None to play no controls.
        between_steps: called before each step.
    """

    def __init__(
        self,
        rollout: Rollout,
        control: Rollout | None,
        between_steps: Callable[[], None],
    ) -> None:
        self.rollouts = [rollout]
        if control is not None:
            self.rollouts.append(control)
        self.between_steps = between_steps
        self.consistent = True
        """Whether the state may be saved: no step or load is in progress."""

    @property
    def envs(self) -> list[SlotVectorEnv]:
        return [rollout.env for rollout in self.rollouts]

    @property
    def running(self) -> list[Rollout]:
        """Rollouts of the current round that have begun, in playing order."""
        return [rollout for rollout in self.rollouts if rollout.begun]

    def play(self) -> Round:
        """Plays the next episode of every env, or the rest of the current one; call :meth:`finish` once it is used.

        A first interrupt takes effect at the end of a step, a second one at once.
        """
        began = time.perf_counter()
        # Totals of the env: the report subtracts them from those after the round.
        phases = self.rollouts[0].env.phase_seconds
        for rollout in self.rollouts:
            if not rollout.begun:
                with self._atomic():
                    rollout.begin()
            while not rollout.over:
                self.between_steps()
                with self._atomic():
                    rollout.step()
        tests = []
        if len(self.rollouts) > 1:  # agents that learn are compared later, on other hosts
            tests = [env.test_accuracy() for env in self.envs]
        return Round(self.rollouts[0].stats(), began, phases, tuple(tests))

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        with interrupts_wait(again=True):
            self.consistent = False
            yield
            self.consistent = True  # not after an error: part of the block may be done

    def finish(self) -> None:
        """Ends the round: :meth:`play` begins another one."""
        for rollout in self.rollouts:
            rollout.begun = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the episode numbers of all envs, and the state of the running rollouts."""
        return {
            "episodes": [torch.from_numpy(env.state.episode.copy()) for env in self.envs],
            "rollouts": [rollout.state_dict() for rollout in self.running],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for env, numbers in zip(self.envs, state["episodes"], strict=True):
            env.continue_after(numbers.numpy())
        saved = state["rollouts"]
        for rollout, rest in zip(self.rollouts[: len(saved)], saved, strict=True):
            rollout.load_state_dict(rest)


@contextmanager
def one_thread() -> Iterator[None]:
    """Enters :func:`~esper.ops.torch_state.training_state` with one intra-op thread of torch, as in every worker.

    The agent is too small to benefit from more, threads waiting for each other are slow on a busy machine, and results
    must not depend on the thread count.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with training_state():
            yield
    finally:
        torch.set_num_threads(before)
