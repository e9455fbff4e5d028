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

    def __init__(self, work: Workload, agent: Agent, collector: Collector) -> None:
        self.work, self.agent, self.collector = work, agent, collector
        config, env = agent.config, agent.env
        self.rounds, of_round = config.run.rounds, env.num_envs * env.horizon
        self.each = [GROWN, 1.0][: len(collector.rollouts)]
        """Work of an epoch in each rollout of a round: of hosts that grow, and of the same hosts alone."""
        self.of_round = of_round * sum(self.each)
        learns = isinstance(agent, PPORun)
        self.of_validation = of_round * GROWN if learns else 0.0
        self.every = config.ppo.validate_every if learns else self.rounds
        baseline = 0 if env.tier is None else config.env.baseline_episodes  # that of simulated hosts is computed
        self.totals = {
            "baseline": float(baseline * env.horizon),
            "practice": 0.0 if not isinstance(agent, PPORun) or agent.pretrained else float(config.ppo.practice_steps),
            "rounds": self.rounds * self.of_round,
            "validation": self._validations(self.rounds) * self.of_validation,
        }
        guesses = {"practice": PRACTICE_SECONDS}
        work.add(Phase(name, total, guesses.get(name)) for name, total in self.totals.items())

    def _validations(self, rounds: int) -> int:
        """Returns the number of validations up to the end of that round."""
        last = rounds == self.rounds and rounds % self.every > 0
        return rounds // self.every + last

    @property
    def begun(self) -> float:
        """Work of the current round that is done, in units of the workload."""
        running = zip(self.collector.running, self.each, strict=False)
        return sum(rollout.steps * rollout.env.num_envs * each for rollout, each in running)

    def after_round(self) -> float:
        """Returns the work of all rounds once the current one is complete; hosts that end early count in full."""
        return self.work.done("rounds") + self.of_round - self.begun

    def resume(self, rounds: int) -> None:
        """Notes what an earlier process has done: everything up to ``rounds`` complete ones, and part of the next."""
        past = {
            "baseline": self.totals["baseline"],
            "practice": self.totals["practice"] * (rounds > 0 or self.begun > 0),
            "rounds": rounds * self.of_round + self.begun,
            "validation": self._validations(self.agent.validated) * self.of_validation,
        }
        for name, units in past.items():
            self.work.skip(name, units)
