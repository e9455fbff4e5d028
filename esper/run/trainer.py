"""The training loop: play a round, learn from it, report it, keep its best host, save."""

from __future__ import annotations

import time
from dataclasses import asdict

from esper.agents.make import OwnController
from esper.compare.comparison import ArmResult
from esper.core.state import Baseline
from esper.env.make import EnvMaker
from esper.files import checkpoint
from esper.files.run_folder import RunFolder
from esper.run.agents import Agent, FixedAgent, LearningAgent
from esper.run.checkpointing import BestHost, Checkpoints
from esper.run.interrupt import interrupts_wait
from esper.run.rollout import Collector
from esper.run.telemetry import RunTelemetry
from esper.telemetry.event import Event, RanksWaited
from esper.training.execution.ranks import joint_seconds

MEASURED_SECONDS = 10.0
"""Seconds of a comparison that a kill may lose."""


class Stopped(KeyboardInterrupt):
    """Raised between two steps of a run that was asked to stop."""


class Trainer:
    """Plays the rounds of a run, then evaluates. Its state can be saved and loaded between any two steps.

    Args:
        follows: the controller's name, or a callable that makes it; for a resumed run, the name has the path of the
            schedule or checkpoint in its folder.
        last_is_intact: see :class:`~esper.run.checkpointing.Checkpoints`.
    """

    def __init__(
        self,
        maker: EnvMaker,
        telemetry: RunTelemetry,
        files: RunFolder,
        follows: str | OwnController,
        last_is_intact: bool,
    ) -> None:
        self.maker = maker
        self.config = maker.config
        self.telemetry = telemetry
        self.env = maker.make(emit=telemetry.emit)
        telemetry.spans = self.env.spans
        try:
            self.agent = self._agent(follows)
        except BaseException:
            self.env.close()
            raise
        self.best = BestHost(files.path, self.env)
        self.checkpoints = Checkpoints(files, self.config.run, self.state_dict, last_is_intact)
        self.collector = Collector(self.agent.rollout, self.agent.control, self._between_steps)
        self.done = 0
        """Number of rounds that are complete."""
        self.env_steps = 0
        """Env steps of these rounds."""
        self.earlier_seconds = 0.0
        """Seconds that the run took before it was resumed."""
        self.began = time.perf_counter()
        """``time.perf_counter()`` when the run began or was resumed."""
        self.stopping = False
        """Whether the run was asked to stop."""

    def _agent(self, follows: str | OwnController) -> Agent:
        if self.config.run.learns:
            return LearningAgent(self.maker, self.env)
        return FixedAgent(self.maker, self.env, follows)

    def _between_steps(self) -> None:
        self.checkpoints.save_by_the_clock()
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        ranks = self.maker.ranks
        if self.stopping or (ranks is not None and ranks.orphaned):
            raise Stopped

    def _measured(self, event: Event) -> None:
        self.telemetry.emit(event)
        self.checkpoints.save_after(MEASURED_SECONDS)
        self._stop_if_asked()

    def prepare(self, baseline: Baseline | None = None) -> None:
        """Sets the no-growth baseline of all envs, or measures it, and the seed of their hosts."""
        self.env.configure(baseline=baseline)
        self.env.prepare()
        run_seed = self.config.run.seed + self.agent.seed_offset
        for env in self.collector.envs:
            env.configure(baseline=self.env.baseline, run_seed=run_seed)

    def play_round(self) -> None:
        """Plays the next round, or what is left of it, and learns from it, reports it and saves."""
        number = self.done + 1
        ranks = self.maker.ranks
        before = joint_seconds(ranks)
        played = self.collector.play()
        with interrupts_wait():  # the rest of a round happens as a whole, or not at all
            self.collector.consistent = False
            stats = self.agent.update(number, played)
            self.best.offer(played)
            self.env_steps += int(played.stats.epochs.sum())
            self.telemetry.round(
                number,
                self.collector.envs,
                played,
                stats,
                self.env_steps,
            )
            if ranks is not None:  # seconds of joint work, and of each rank's waiting
                seconds, *waited = (joint_seconds(ranks) - before).tolist()
                self.telemetry.emit(RanksWaited(number, seconds, tuple(waited)))
            self.collector.finish()
            self.done = number
            self.collector.consistent = True
            self.checkpoints.save_round(number)
        self.validate()

    def validate(self) -> None:
        """Validates the agent, if that is due; also one that has not played yet, or whose run stopped before it was."""
        validated = self.agent.validate(self.done, self._between_steps)
        if validated is None:
            return
        with interrupts_wait():
            self.telemetry.emit(validated)
            self.checkpoints.save()

    def evaluate(self) -> list[ArmResult]:
        return self.agent.evaluate(self._measured)

    @property
    def seconds(self) -> float:
        """Seconds that the run took so far, including those before it was resumed."""
        return self.earlier_seconds + time.perf_counter() - self.began

    def state_dict(self) -> checkpoint.State:
        """Returns all state needed to resume, and the policy on its own. Raises RuntimeError before the baseline."""
        baseline = self.env.baseline
        if baseline is None:
            raise RuntimeError("a run has no state before its baseline is measured: call prepare() first")
        return {
            "round": self.done,
            "env_steps": self.env_steps,
            "best": self.best.accuracy,
            "seconds": self.seconds,
            "baseline": asdict(baseline),
            "collector": self.collector.state_dict(),
            "agent": self.agent.state_dict(),
            "policy": self.agent.policy_state(),
        }

    def load_state_dict(self, state: checkpoint.State) -> None:
        """Loads ``state``. Raises one of ``MISFITS`` if it does not belong to this run."""
        rounds = self.config.run.rounds
        sizes_fit = all(type(size) is int and size >= 0 for size in state["logs"].values())
        if not 0 <= state["round"] <= rounds or not sizes_fit:
            raise ValueError(f"it says round {state['round']} of {rounds}, with log sizes {state['logs']}")
        # With the saved baseline, preparing the envs measures nothing.
        baseline = dict(state["baseline"])
        for name, values in baseline.items():
            if isinstance(values, list):
                baseline[name] = tuple(values)
        self.prepare(Baseline(**baseline))
        self.collector.load_state_dict(state["collector"])
        self.agent.load_state_dict(state["agent"])
        self.done = int(state["round"])
        self.env_steps = int(state["env_steps"])
        self.best.accuracy = float(state["best"])
        self.earlier_seconds = float(state["seconds"])

    def close(self) -> None:
        """Stops the workers of all envs."""
        for env in self.collector.envs:
            env.close()
