"""The work of a run: how much there is of each kind, and counting it as it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from esper.rollout.collector import Collector
from esper.run.agents import FixedAgent, LearningAgent, PPORun
from esper.telemetry.workload import GROWN, PRACTICE_SECONDS, Phase, Workload


class RunWork:
    """Counts the work of one run, in a workload that may be shared by several runs.

    Args:
        work: gets the phases of this run, all but its comparison.
    """

    def __init__(self, work: Workload, agent: FixedAgent | LearningAgent, collector: Collector) -> None:
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
        self.done: Counter[str] = Counter()
        """Work of this run that is done, by phase."""
        if isinstance(agent, LearningAgent):
            agent.count_work = self.advance
            agent.work = work

    def add_comparison(self) -> None:
        if isinstance(self.agent, LearningAgent):
            self.work.add([self.agent.comparison_work()])

    def _validations(self, rounds: int) -> int:
        """Returns the number of validations up to the end of that round."""
        last = rounds == self.rounds and rounds % self.every > 0
        return rounds // self.every + last

    def advance(self, name: str, units: float) -> None:
        """Counts work that was done since the last call."""
        self.done[name] += units  # type: ignore[assignment]
        self.work.advance(name, units)

    def _counter(self, name: str, each: float = 1.0) -> Callable[[int], None]:
        return lambda hosts: self.advance(name, each * hosts)

    def count_baseline(self) -> None:
        self.agent.env.count_epochs = self._counter("baseline")

    def count_rounds(self) -> None:
        for rollout, each in zip(self.collector.rollouts, self.each, strict=True):
            rollout.env.count_epochs = self._counter("rounds", each)

    def round_done(self, number: int) -> None:
        """Counts what hosts that ended early have left out in the rounds up to ``number``."""
        self._settle("rounds", number * self.of_round)

    def validated(self, number: int) -> None:
        """Counts the same of validations up to the end of round ``number``."""
        self._settle("validation", self._validations(number) * self.of_validation)

    def _settle(self, name: str, until: float) -> None:
        self.advance(name, max(0.0, until - self.done[name]))

    def resume(self, rounds: int, validated: bool) -> None:
        """Notes what an earlier process has done: everything up to ``rounds`` complete ones, and part of the next.

        Args:
            validated: whether the validation after the last of them is done.
        """
        running = zip(self.collector.running, self.each, strict=False)
        begun = sum(rollout.steps * rollout.env.num_envs * each for rollout, each in running)
        past = {
            "baseline": self.totals["baseline"],
            "practice": self.totals["practice"] * (rounds > 0 or begun > 0),
            "rounds": rounds * self.of_round + begun,
            "validation": self._validations(rounds - (not validated)) * self.of_validation,
        }
        for name, units in past.items():
            self.done[name] += units  # type: ignore[assignment]
            self.work.skip(name, units)
