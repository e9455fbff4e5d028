"""Collecting the rounds of a run: rollouts that can be interrupted, saved and resumed between any two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from esper.env.slot_env import SlotVectorEnv
from esper.rollout.interrupt import interrupts_wait
from esper.rollout.rollout import EpisodeStats, Floats, Rollout


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
        """Returns the episode numbers and the experience of all envs, and the state of the running rollouts."""
        return {
            "episodes": [torch.from_numpy(env.state.episode.copy()) for env in self.envs],
            "experience": [env.gatherer.state_dict() for env in self.envs],
            "rollouts": [rollout.state_dict() for rollout in self.running],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for env, numbers in zip(self.envs, state["episodes"], strict=True):
            env.continue_after(numbers.numpy())
        for env, experience in zip(self.envs, state["experience"], strict=True):
            env.gatherer.load_state_dict(experience)
        saved = state["rollouts"]
        for rollout, rest in zip(self.rollouts[: len(saved)], saved, strict=True):
            rollout.load_state_dict(rest)
