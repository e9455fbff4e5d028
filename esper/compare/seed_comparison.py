"""All arms of a comparison with one seed: those that learn are trained, in turns, then all play the held-out hosts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from esper.agents.spec import ALONE
from esper.compare.alternatives import CONTROLS
from esper.compare.arms import Arm
from esper.compare.comparison import ArmResult
from esper.compare.runner import (
    ArmRunner,
    GrowingRunner,
    Progress,
    Results,
    Save,
    in_order,
    play_rounds,
)
from esper.config import ConfigError
from esper.env.make import EnvMaker
from esper.env.state import Baseline
from esper.files import checkpoint
from esper.run.agents import LearningAgent
from esper.run.experiment import Experiment
from esper.telemetry.event import Event, RoundCompleted
from esper.telemetry.sink import Sink
from esper.training.rng import HELD_OUT

Learned = Callable[[str, int, RoundCompleted], None]
"""Receives the name of an arm, its training seed, and each round that it has learned from."""


class SeedComparison:
    """All arms with one seed: those that learn, and the comparison of all on the held-out hosts.

    Args:
        arms: with resolved configs; the seed takes the place of their own.
        folder: where learning arms have their run folders; one found there is continued.
        first: maker of the envs of the first arm: its task, ranks and length of an episode are those of all.
        n_envs: number of hosts per round.
        learned: called after each round that an arm has learned from.
        order_seed: seed of the order in which arms take turns; no result depends on it.
        follows: returns an arm's controller, with the path of what it follows.

    Raises:
        ConfigError: an arm cannot be set up.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        seed: int,
        folder: Path,
        first: EnvMaker,
        n_envs: int,
        learned: Learned | None,
        order_seed: int,
        follows: Callable[[Arm], str],
    ) -> None:
        self.seed = seed
        self.n_envs = n_envs
        self.learned = learned
        self.follows = follows
        self.names = [arm.name for arm in arms]
        self.epochs = first.config.env.episode_length
        self.task = first.task
        self.ranks = first.ranks
        self.order = np.random.default_rng([seed, len(arms), order_seed])
        self.baselines: dict[Any, Baseline] = {}
        self.experiments: dict[str, Experiment] = {}
        self.runners: dict[str, ArmRunner] = {}
        # If an arm cannot be set up, those before it are closed.
        with ExitStack() as opened:
            for place, arm in enumerate(arms):
                seeded = replace(arm, config=arm.config.with_values(run={"seed": seed}))
                with errors_name(arm):
                    if arm.learns:
                        experiment = self._experiment(seeded, folder / _folder_name(place, arm.name))
                        self.experiments[arm.name] = opened.enter_context(closing(experiment))
                    else:
                        runner = self._runner(seeded)
                        self.runners[arm.name] = opened.enter_context(closing(runner))
            self._opened = opened.pop_all()

    def _experiment(self, arm: Arm, folder: Path) -> Experiment:
        """Returns the run of a learning arm, from its last checkpoint if there is one."""
        sinks = []
        if self.learned is not None:
            sinks.append(_Rounds(arm.name, self.seed, self.learned))
        if checkpoint.files(folder):
            task = self.task or arm.config.task.name
            return Experiment.resume(folder, sinks, task, ranks=self.ranks)
        if folder.exists():
            shutil.rmtree(folder)  # the comparison was killed before the run had a checkpoint
        return Experiment(arm.config, folder, sinks, self.task, ranks=self.ranks)

    def _runner(self, arm: Arm) -> ArmRunner:
        """Returns the runner of an arm that does not learn."""
        maker = EnvMaker.of(arm.config, self.task, self.ranks)
        held_out = self.seed + HELD_OUT
        if arm.control_of is not None:
            return CONTROLS[arm.controller](maker, arm.control_of, held_out)
        controller = ALONE if arm.alone else self.follows(arm)
        return GrowingRunner(maker, controller, self.n_envs, held_out, self.baselines)

    def run(
        self,
        pairs: int,
        rounds: range,
        results: Results,
        save: Save,
        progress: Progress,
    ) -> None:
        """Trains the arms that learn, then plays ``rounds`` of every arm; an interrupt keeps what was done."""
        try:
            self._learn()
            runners = self._ready()
            play_rounds(runners, rounds, self.order, results, progress, save)
            hosts = in_order(results, pairs)
            for name, experiment in self.experiments.items():
                others = [other for other in hosts if other != name]
                arms = [ArmResult.of(arm, hosts[arm]) for arm in (name, *others)]
                with experiment.trainer.turn():
                    experiment.end(arms, interrupted=False)
        finally:
            for experiment in self.experiments.values():
                experiment.save_within_round()
                experiment.trainer.checkpoints.write()

    def _learn(self) -> None:
        """Plays what is left of the arms' rounds, one round of each in turn, in random order."""
        experiments = list(self.experiments.values())
        for experiment in experiments:
            with experiment.trainer.turn():
                experiment.start()
        rounds = [experiment.config.run.rounds for experiment in experiments]
        for number in range(max(rounds, default=0)):
            for place in self.order.permutation(len(experiments)):
                trainer = experiments[place].trainer
                # Arms may have different numbers of rounds, and some may be done by an earlier process.
                if trainer.done == number < trainer.config.run.rounds:
                    with trainer.turn():
                        trainer.play_round()

    def _ready(self) -> dict[str, ArmRunner]:
        """Returns the runners of all arms on held-out hosts; learning arms play greedily what they have learned."""
        held_out = self.seed + HELD_OUT
        for name, experiment in self.experiments.items():
            trainer = experiment.trainer
            agent = trainer.agent
            assert isinstance(agent, LearningAgent)
            contender = partial(agent.contender, run_seed=held_out)
            runner = GrowingRunner(
                trainer.maker,
                contender,
                self.n_envs,
                held_out,
                self.baselines,
                agent.experience,
            )
            runner.env.configure(baseline=trainer.env.baseline)
            self.runners[name] = self._opened.enter_context(closing(runner))
        runners = {name: self.runners[name] for name in self.names}
        # The baselines of arms that have learned are known, and serve the others.
        known_first = {name: runners[name] for name in self.experiments} | runners
        for ready in known_first.values():
            ready.prepare()
        return runners

    def close(self) -> None:
        """Stops all threads and closes the logs; a second call does nothing."""
        self._opened.close()


@dataclass(eq=False)
class _Rounds(Sink):
    """Passes on the rounds of one arm."""

    arm: str
    seed: int
    learned: Learned

    def handle(self, event: Event) -> None:
        if isinstance(event, RoundCompleted):
            self.learned(self.arm, self.seed, event)


def _folder_name(place: int, arm: str) -> str:
    """``1-sparse``: unique, and without the characters of an arm's name that are special in paths."""
    plain = re.sub(r"[^A-Za-z0-9_.=]+", "-", arm)
    return f"{place}-{plain[:60]}"


@contextmanager
def errors_name(arm: Arm) -> Iterator[None]:
    """Adds the name of the arm to ConfigErrors."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name!r}: {error}") from None
