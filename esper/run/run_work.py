"""The work of a run: how much there is of each kind, and how much of it an earlier process has done."""

from __future__ import annotations

from esper.rollout.collector import Collector
from esper.run.agents import Agent, PPORun
from esper.telemetry.workload import GROWN, PRACTICE_SECONDS, Phase, Workload


class RunWork:
    """The planned work of one run.

    Args:
        work: gets the phases of this run, all but its comparison; several runs may share it.
    """

    def __init__(
        self,
        work: Workload,
        agent: Agent,
        collector: Collector,
    ) -> None:
        self.work = work
        self.agent = agent
        self.collector = collector
        config = agent.config
        env = agent.env
        self.rounds = config.run.rounds
        self.units = [GROWN, 1.0][: len(collector.rollouts)]
        """Work of an epoch in each rollout of a round: of hosts that grow, and of the same hosts alone."""
        epochs = env.num_envs * env.horizon
        self.of_round = epochs * sum(self.units)
        # Only PPO practises and is validated.
        self.of_validation = 0.0
        self.every = self.rounds
        practice = 0.0
        if isinstance(agent, PPORun):
            self.of_validation = epochs * GROWN
            self.every = config.ppo.validate_every
            if not agent.pretrained:
                practice = float(config.ppo.practice_steps)
        baseline = 0.0  # that of simulated hosts is computed
        if env.execution is not None:
            baseline = float(config.env.baseline_episodes * env.horizon)
        self.totals = {
            "baseline": baseline,
            "practice": practice,
            "rounds": self.rounds * self.of_round,
            "validation": self._validations(self.rounds) * self.of_validation,
        }
        for name, total in self.totals.items():
            guess = PRACTICE_SECONDS if name == "practice" else None
            work.add([Phase(name, total, guess)])

    def _validations(self, rounds: int) -> int:
        """Returns the number of validations up to the end of that round."""
        last = rounds == self.rounds and rounds % self.every > 0
        return rounds // self.every + last

    @property
    def begun(self) -> float:
        """Work of the current round that is done, in units of the workload."""
        work = 0.0
        # The hosts left alone may not have begun.
        for rollout, units in zip(self.collector.running, self.units, strict=False):
            work += rollout.steps * rollout.env.num_envs * units
        return work

    def after_round(self) -> float:
        """Returns the work of all rounds once the current one is complete; hosts that end early count in full."""
        return self.work.done("rounds") + self.of_round - self.begun

    def resume(self, rounds: int) -> None:
        """Notes what an earlier process has done: everything up to ``rounds`` complete ones, and part of the next."""
        begun = self.begun
        self.work.skip("baseline", self.totals["baseline"])
        if rounds > 0 or begun > 0:
            self.work.skip("practice", self.totals["practice"])
        self.work.skip("rounds", rounds * self.of_round + begun)
        self.work.skip("validation", self._validations(self.agent.validated) * self.of_validation)
