"""Comparisons of arms that learn: each is trained with several training seeds, in turns with the others.

A training seed is one run of every learning arm, in a run folder of its own, on the same hosts in the same order. What
each has learned is then compared, with the arms that do not learn, on the held-out hosts of that seed.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from esper.config import ConfigError
from esper.data.task import Task
from esper.env.baseline import Baseline
from esper.env.make import EnvMaker
from esper.evaluation.analysis import analyse, metrics_of
from esper.evaluation.arms import Arm
from esper.evaluation.comparison import ArmResult, ComparisonResult, make_runner, reference_of, with_confirmed_task
from esper.evaluation.folder import RESULTS, WHOLE, ComparisonFolder, Part
from esper.evaluation.runner import (
    HELD_OUT,
    ArmRunner,
    GrowingRunner,
    HostResult,
    Progress,
    Results,
    arms_work,
    in_order,
    name_score,
    play_rounds,
    prepare_arms,
    split_pairs,
    whole_messages,
)
from esper.evaluation.statistics import MIN_SEEDS
from esper.files import checkpoint
from esper.files.atomic import write_json
from esper.files.run_folder import require_empty
from esper.files.system_info import check_devices
from esper.rollout.interrupt import termination_interrupts
from esper.rollout.threads import one_thread
from esper.run.agents import LearningAgent
from esper.run.experiment import Experiment
from esper.run.trainer import Trainer
from esper.telemetry.event import ArmPlayed, Event, RoundCompleted, ScoreDefined
from esper.telemetry.sink import Sink
from esper.telemetry.workload import Workload
from esper.training.execution.ranks import RunRanks

Learned = Callable[[str, int, RoundCompleted], None]
"""Receives the name of an arm, its training seed, and each round that it has learned from."""


class LearningComparison:
    """Compares arms of which at least one learns; it is set up before anything is written or played.

    Args:
        arms: two or more, see ``read_arms``.
        pairs: number of held-out hosts of each training seed.
        folder: output folder; must be empty or not exist yet.
        train_seeds: number of training seeds: ``run.seed`` and those after it.
        reference: the arm that the others are compared with; None: the first that leaves hosts alone, else the last.
        progress: called after each arm's round on held-out hosts.
        learned: called after each round that an arm has learned from.
        task: what hosts are trained on; None: the task named in the config.
        results: rounds on held-out hosts that are already saved in ``folder``, see :meth:`resume`.
        work: counts what is done, and estimates the time that is left.
        ranks: the ranks that hosts are spread over, on rank 0; None: all train in this process.
        part: which of the training seeds are played; the results are those of all parts once they are merged.

    Raises:
        ConfigError: no arm learns, there are fewer than two arms, the reference is not one of them, or an arm cannot be
            set up.
    """

    @one_thread()
    def __init__(
        self,
        arms: Sequence[Arm],
        pairs: int,
        folder: Path | str,
        train_seeds: int = MIN_SEEDS,
        reference: str | None = None,
        progress: Progress | None = None,
        learned: Learned | None = None,
        task: Task | None = None,
        results: Results | None = None,
        work: Workload | None = None,
        ranks: RunRanks | None = None,
        part: Part = WHOLE,
    ) -> None:
        self.part, self.seeds = part, part.of(train_seeds, "training seeds")
        self.reference = reference_of(arms, reference)
        if not any(arm.learns for arm in arms):
            raise ConfigError("no arm learns; use ComparisonRun, or add one that does, such as ppo")
        self.files = ComparisonFolder(Path(folder))
        self.resumed = results is not None
        if not self.resumed:
            require_empty(self.files.path)
        check_devices(arms[0].config.run.device)
        self.ranks = whole_messages(ranks)
        first = EnvMaker.of(arms[0].config, task, ranks)
        self.task, self.score = first.task, first.score
        self.arms = tuple(replace(arm, config=_resolved(arm, first.task)) for arm in arms)
        self.pairs, self.train_seeds, self.progress, self.learned = pairs, train_seeds, progress, learned
        self.rounds, self.n_envs = split_pairs(pairs, first.config.env.n_envs)
        self.results = _by_seed(results or {}, [arm.name for arm in arms], self.rounds, train_seeds)
        """Results of each training seed."""
        self.result: ComparisonResult | None = None
        """Result of the training seeds that every arm has finished; set when :meth:`run` ends in any way."""
        self.work, left = work or Workload(), self._unfinished()
        self._next = self._open(left[0]) if left else None
        """The first training seed that is not finished, ready to learn."""
        alone, epochs = {arm.name: arm.alone for arm in arms}, first.config.env.episode_length
        self.work.add([arms_work(alone, self.rounds, self.n_envs, epochs)])
        self.work.repeat(len(left))

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        progress: Progress | None = None,
        learned: Learned | None = None,
        task: Task | str | None = None,
        reference: str | None = None,
        controllers: Sequence[str] = (),
        work: Workload | None = None,
        ranks: RunRanks | None = None,
    ) -> LearningComparison:
        """Returns a comparison that continues after the last saved step, and ends as if it had never stopped.

        Arguments and errors are those of :meth:`ComparisonRun.resume`.
        """
        files = ComparisonFolder(Path(folder))
        settings = files.settings(controllers)
        if settings.train_seeds is None:
            raise ConfigError(f"no arm of {folder} learns: resume it with ComparisonRun")
        arms = with_confirmed_task(settings.arms, task, folder)
        results = files.results([arm.name for arm in arms])
        return cls(
            arms,
            settings.pairs,
            folder,
            settings.train_seeds,
            reference or settings.reference,
            progress,
            learned,
            task if isinstance(task, Task) else None,
            results,
            work,
            ranks,
            settings.part,
        )

    @one_thread()
    def run(self) -> ComparisonResult:
        """Trains and compares what is left, and writes the results.

        On an interrupt (Ctrl-C, SIGTERM) or an error, the results of all finished training seeds are written before it
        is raised; they are also in :attr:`result`. An interrupt takes effect at the end of a step.
        """
        if not self.resumed:
            self.files.create(self.arms, self.pairs, self.reference, self.part, self.train_seeds)
        with closing(self), termination_interrupts():
            try:
                if self._next is not None:
                    name_score(self.score, self.progress)
                self.work.start()
                for index in self._unfinished():
                    self._next = self._next or self._open(index)
                    with closing(self._next) as one:
                        one.run(self.pairs, self.rounds, self.results[index], self._save(index), self._tell)
                    self._next = None
            finally:
                self.result = self._analyse()
                if self.result is not None and self.part == WHOLE:
                    write_json(self.files.path / RESULTS, self.result.plain())
        assert self.result is not None
        return self.result

    def _open(self, index: int) -> _TrainingSeed:
        seed = self.arms[0].config.run.seed + index
        folder = self.files.path / f"seed-{seed}"
        return _TrainingSeed(self.arms, seed, folder, self.n_envs, self.task, self.learned, self.work, self.ranks)

    def _unfinished(self) -> list[int]:
        """Returns the training seeds that an arm has not finished, counted from 0."""
        return [index for index in self.seeds if any(len(own) < self.rounds for own in self.results[index].values())]

    @property
    def finished(self) -> bool:
        """Whether all training seeds are finished."""
        return not self._unfinished()

    def _save(self, index: int) -> Callable[[str, int, list[HostResult]], None]:
        return lambda arm, number, hosts: self.files.save_round(arm, index * self.rounds + number, hosts)

    def _tell(self, event: ArmPlayed | ScoreDefined) -> None:
        if self.progress is not None:
            self.progress(event)

    def _analyse(self) -> ComparisonResult | None:
        """Returns the result of the training seeds that every arm has finished; None if there is none."""
        left = self._unfinished()
        done = [in_order(self.results[index], self.pairs) for index in self.seeds if index not in left]
        if not done:
            return None
        hosts = {arm.name: [host for seed in done for host in seed[arm.name]] for arm in self.arms}
        metrics = analyse(hosts, self.reference, metrics_of(self.score), len(done))
        asked = self.pairs * self.train_seeds
        return ComparisonResult(
            self.arms, self.reference, asked, hosts, metrics, self.files.path, len(done), self.train_seeds
        )

    def close(self) -> None:
        """Stops the lanes and closes the logs; a second call does nothing."""
        if self._next is not None:
            self._next.close()


class _TrainingSeed:
    """All arms with one training seed: those that learn, and the comparison of what they have learned."""

    def __init__(
        self,
        arms: Sequence[Arm],
        seed: int,
        folder: Path,
        n_envs: int,
        task: Task | None,
        learned: Learned | None,
        work: Workload,
        ranks: RunRanks | None,
    ) -> None:
        self.alone, self.work = [arm.name for arm in arms if arm.alone], work
        self.seed, self.n_envs, self.names = seed, n_envs, [arm.name for arm in arms]
        self.order = np.random.default_rng([seed, len(arms)])
        """Order in which the arms take turns; no result depends on it."""
        self.baselines: dict[Any, Baseline] = {}
        self.experiments: dict[str, Experiment] = {}
        self.runners: dict[str, ArmRunner] = {}
        with ExitStack() as opened:
            for place, arm in enumerate(arms):
                try:
                    own = replace(arm, config=arm.config.with_values(run={"seed": seed}))
                    if arm.learns:
                        sinks = [_Rounds(arm.name, seed, learned)] if learned else []
                        own_folder = folder / _folder_name(place, arm.name)
                        experiment = _experiment(own, own_folder, task, sinks, work, ranks)
                        self.experiments[arm.name] = opened.enter_context(closing(experiment))
                    else:
                        maker = EnvMaker.of(own.config, task, ranks)
                        runner = make_runner(own, maker, n_envs, seed + HELD_OUT, self.baselines)
                        self.runners[arm.name] = opened.enter_context(closing(runner))
                except ConfigError as error:
                    raise ConfigError(f"arm {arm.name!r}: {error}") from None
            self._opened = opened.pop_all()

    def run(
        self,
        pairs: int,
        rounds: int,
        results: Results,
        save: Callable[[str, int, list[HostResult]], None],
        progress: Progress,
    ) -> None:
        """Trains the arms that learn, then plays ``rounds`` rounds of every arm; an interrupt keeps what was done."""
        try:
            self._learn()
            runners = self._ready()
            play_rounds(runners, range(rounds), self.order, results, self._naming(progress), save, self.work)
            hosts = in_order(results, pairs)
            for name, experiment in self.experiments.items():
                arms = [ArmResult.of(other, hosts[other]) for other in (name, *(n for n in hosts if n != name))]
                with _turn(experiment.trainer):
                    experiment.end(arms, interrupted=False)
        finally:
            for experiment in self.experiments.values():
                experiment.save_within_round()
                experiment.trainer.checkpoints.write()

    def _learn(self) -> None:
        """Plays what is left of the arms' rounds, one round of each in turn, in random order."""
        experiments = list(self.experiments.values())
        for experiment in experiments:
            with _turn(experiment.trainer):
                experiment.start()
                experiment.trainer.practise()
        for number in range(max(experiment.config.run.rounds for experiment in experiments)):
            for place in self.order.permutation(len(experiments)):
                trainer = experiments[place].trainer
                if trainer.done == number < trainer.config.run.rounds:
                    with _turn(trainer):
                        trainer.play_round()

    def _ready(self) -> dict[str, ArmRunner]:
        """Returns the runners of all arms on held-out hosts; learning arms play greedily what they have learned."""
        for name, experiment in self.experiments.items():
            agent, held_out = experiment.trainer.agent, self.seed + HELD_OUT
            assert isinstance(agent, LearningAgent)
            make = agent.informed(partial(agent.contender, run_seed=held_out))
            runner = GrowingRunner(experiment.trainer.maker, make, self.n_envs, held_out, self.baselines)
            runner.env.baseline = experiment.trainer.env.baseline
            self.runners[name] = self._opened.enter_context(closing(runner))
        runners = {name: self.runners[name] for name in self.names}
        known_first = {name: runners[name] for name in dict.fromkeys((*self.experiments, *runners))}  # baselines
        epochs = max(experiment.config.env.episode_length for experiment in self.experiments.values())
        prepare_arms(known_first, self.alone, self.n_envs, epochs, self.work)
        return runners

    def _naming(self, progress: Progress) -> Progress:
        """Adds the training seed to the names of arms."""

        def tell(event: ArmPlayed | ScoreDefined) -> None:
            if isinstance(event, ArmPlayed):
                event = replace(event, controller=f"{event.controller}, training seed {self.seed},")
            progress(event)

        return tell

    def close(self) -> None:
        """Stops the lanes and closes the logs; a second call does nothing."""
        self._opened.close()


class _Rounds(Sink):
    """Passes on the rounds of one arm."""

    def __init__(self, arm: str, seed: int, learned: Learned) -> None:
        self.arm, self.seed, self.learned = arm, seed, learned

    def handle(self, event: Event) -> None:
        if isinstance(event, RoundCompleted):
            self.learned(self.arm, self.seed, event)


@contextmanager
def _turn(trainer: Trainer) -> Iterator[None]:
    """Counts only the seconds of its own turns as those of a run."""
    trainer.started = time.perf_counter()
    try:
        yield
    finally:
        trainer.earlier_seconds, trainer.started = trainer.seconds, time.perf_counter()


def _experiment(
    arm: Arm, folder: Path, task: Task | None, sinks: Sequence[Sink], work: Workload, ranks: RunRanks | None
) -> Experiment:
    """Returns the run of a learning arm, from its last checkpoint if there is one."""
    if checkpoint.files(folder):
        return Experiment.resume(folder, sinks, task or arm.config.task.name, work=work, ranks=ranks)
    if folder.exists():
        shutil.rmtree(folder)  # the comparison was killed before the run had a checkpoint
    return Experiment(arm.config, folder, sinks, task, work=work, ranks=ranks)


def _folder_name(place: int, arm: str) -> str:
    """``1-sparse``: unique, and without the characters of an arm's name that are special in paths."""
    return f"{place}-{re.sub(r'[^A-Za-z0-9_.=]+', '-', arm)[:60]}"


def _resolved(arm: Arm, task: Task | None) -> Any:
    try:
        return EnvMaker.of(arm.config, task).config
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name!r}: {error}") from None


def _by_seed(results: Results, names: Sequence[str], rounds: int, train_seeds: int) -> list[Results]:
    """Splits the saved rounds, which are counted through all training seeds, by training seed."""
    split: list[Results] = [{name: {} for name in names} for _ in range(train_seeds)]
    for name, own in results.items():
        for number, hosts in own.items():
            split[number // rounds][name][number % rounds] = hosts
    return split
