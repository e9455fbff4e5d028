"""A comparison of arms on the same hosts, saved as it goes: `esper compare`.

Arms that do not learn play the held-out hosts of the seed, the same ones that an agent's run with that seed ends with.
If an arm learns, all of this is done for several training seeds: each is one run of every learning arm, and what they
have learned is compared, with the other arms, on the held-out hosts of that seed.
"""

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
from esper.compare.analysis import analyse, metrics_of
from esper.compare.arms import Arm, reference_of
from esper.compare.comparison import ComparisonResult
from esper.compare.controls import CONTROLS
from esper.compare.folder import RESULTS, ComparisonFolder, Settings
from esper.compare.runner import (
    ArmRunner,
    GrowingRunner,
    HostResult,
    Progress,
    Results,
    in_order,
    maker_of,
    name_score,
    play,
    split_pairs,
)
from esper.compare.statistics import MIN_SEEDS
from esper.config import ConfigError, TrainingConfig, read_toml
from esper.core.state import Baseline
from esper.data.names import SIMULATED
from esper.data.task import Task
from esper.data.user_code import confirmed, same_task
from esper.env.make import EnvMaker
from esper.files import checkpoint
from esper.files.atomic import given_path, write_json
from esper.files.claim import claimed, require_empty
from esper.files.run_folder import CONFIG
from esper.run.experiment import Experiment
from esper.run.interrupt import termination_interrupts
from esper.run.rollout import one_thread
from esper.telemetry.event import ArmPlayed, Event, RoundCompleted, ScoreDefined
from esper.telemetry.sink import Sink
from esper.training.execution.ranks import RunRanks
from esper.training.rng import HELD_OUT

Learned = Callable[[str, int, RoundCompleted], None]
"""Receives the name of an arm, its training seed, and each round that it has learned from."""

MAY_DIFFER = re.compile(
    r"task\.(name|data)|run\.(device|lanes|evaluation_pairs|checkpoint_.*)|(telemetry|track|anomaly)\..*"
)
"""Values of a run's config that do not change what its agent learns; names of tasks are compared on their own."""


class ComparisonRun:
    """Compares arms on the same hosts; it is set up before anything is written or played.

    Args:
        arms: two or more, see ``read_arms``.
        pairs: number of hosts of each arm; if an arm learns, of each training seed.
        folder: output folder; must be empty or not exist yet. Finished runs of learning arms may lie there already, in
            ``seed-SEED/NUMBER-ARM``, as other machines have trained them.
        reference: the arm that the others are compared with; None: the first that leaves hosts alone, else the last.
        train_seeds: number of training seeds, ``run.seed`` and those after it, if an arm learns; None: ``MIN_SEEDS``.
        progress: called after each arm's round on held-out hosts.
        learned: called after each round that an arm has learned from.
        task: what hosts are trained on; None: the task named in the config.
        order_seed: seed of the order in which arms take turns; no result depends on it.
        results: rounds that are already saved in ``folder``, see :meth:`resume`; None: a new comparison.
        ranks: the ranks that hosts are spread over, on rank 0; None: all train in this process.
        width: channels of the hosts' first block, or features of a token, instead of the task's.

    Raises:
        ConfigError: there are fewer than two arms, the reference is not one of them, an arm cannot be set up, or
            ``train_seeds`` is given and no arm learns.
    """

    @one_thread()
    def __init__(
        self,
        arms: Sequence[Arm],
        pairs: int,
        folder: Path | str,
        reference: str | None = None,
        *,
        train_seeds: int | None = None,
        progress: Progress | None = None,
        learned: Learned | None = None,
        task: Task | None = None,
        order_seed: int = 0,
        results: Results | None = None,
        ranks: RunRanks | None = None,
        width: int | None = None,
    ) -> None:
        self.reference = reference_of(arms, reference)
        self.pairs = pairs
        self.train_seeds = count_seeds(arms, train_seeds)
        """Number of training seeds; None if no arm learns."""
        self.files = ComparisonFolder(given_path(folder))
        self.resumed = results is not None
        if not self.resumed:
            _require_free(self.files.path)
        # All arms share the task, the ranks and the length of an episode of the first one.
        self.first = maker_of(arms[0].config, task, ranks)
        self.width = width
        if width is not None:
            self.first = self.first.with_width(width)
        self.arms = tuple(resolved(arm, self.first) for arm in arms)
        self.progress = progress
        self.learned = learned
        self.order_seed = order_seed
        rounds, hosts = split_pairs(pairs, self.first.config.env.n_envs)
        self.rounds = rounds
        """Number of rounds of each training seed."""
        self.n_envs = hosts
        self.seeds = range(self.train_seeds or 1)
        """The training seeds, counted from 0."""
        self.results = self._by_seed(results or {})
        """Results of each training seed, or the one of arms that do not learn."""
        self.result: ComparisonResult | None = None
        """Result of what every arm has finished, training seeds or rounds; set when :meth:`run` ends in any way."""

        unfinished = self._unfinished()
        self._next: SeedComparison | None = None
        """The first training seed that is not finished, ready to be played."""
        if unfinished:
            self._next = self._open(unfinished[0])

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        progress: Progress | None = None,
        task: Task | str | None = None,
        reference: str | None = None,
        controllers: Sequence[str] = (),
        *,
        learned: Learned | None = None,
        ranks: RunRanks | None = None,
    ) -> ComparisonRun:
        """Returns a comparison that continues after the last saved step, and ends as if it had never stopped.

        A completed one is only analysed again, for example against another ``reference``. A user-defined task or
        controller is code, and is never run just because a folder names it: pass the task again in ``task``, as itself
        or its name, and the names of such controllers in ``controllers``.

        Raises:
            ConfigError: there is no comparison in the folder, its arms can no longer be set up, ``reference`` is not
                one of them, or a user-defined task or controller is not named.
        """
        files = ComparisonFolder(given_path(folder))
        settings = files.settings(controllers)
        user_task = task if isinstance(task, Task) else None
        name = task.name if isinstance(task, Task) else task
        named = confirmed("task", settings.arms[0].config.task.name, name, str(folder))
        arms = []
        for arm in settings.arms:
            config = arm.config.with_values(task={"name": named})
            arms.append(replace(arm, config=config))
        return cls(
            arms,
            settings.pairs,
            folder,
            settings.reference if reference is None else reference,
            train_seeds=settings.train_seeds,
            progress=progress,
            learned=learned,
            task=user_task,
            results=files.results([arm.name for arm in arms]),
            ranks=ranks,
            width=settings.width,
        )

    @one_thread()
    def run(self) -> ComparisonResult:
        """Trains and plays what is left, and writes the results.

        On an interrupt (Ctrl-C, SIGTERM) or an error, the results of what every arm has finished are written before it
        is raised; they are also in :attr:`result`. While arms learn, an interrupt takes effect at the end of a step.
        """
        with claimed(self.files.path), closing(self), termination_interrupts():
            if not self.resumed:
                _require_free(self.files.path)
                self.files.create(Settings(self.pairs, self.reference, self.train_seeds, self.arms, self.width))
            try:
                self._play()
            finally:
                self.result = self._analyse()
                if self.result is not None:
                    write_json(self.files.path / RESULTS, self.result.plain())
        if self.result is None:
            raise RuntimeError(f"{self.files.path} has no round that every arm has finished")
        return self.result

    def _play(self) -> None:
        """Plays the training seeds that are not finished, one after the other."""
        if self._next is not None:
            name_score(self.first.score, self.progress)
        for index in self._unfinished():
            if self._next is None:
                self._next = self._open(index)
            with closing(self._next) as seed:
                seed.learn()
                play(
                    seed.ready(),
                    self.pairs,
                    self.first.config.env.n_envs,
                    seed.order,
                    partial(self._tell, seed.seed),
                    self.results[index],
                    partial(self.files.save_round, index * self.rounds),
                )
            self._next = None

    def _open(self, index: int) -> SeedComparison:
        return SeedComparison(self, self.arms[0].config.run.seed + index)

    def _unfinished(self) -> list[int]:
        """Returns the training seeds that an arm has not finished, counted from 0."""
        return [index for index in self.seeds if not self._has_finished(index)]

    def _has_finished(self, index: int) -> bool:
        played = map(len, self.results[index].values())
        return min(played) >= self.rounds

    def _tell(self, seed: int, event: ArmPlayed | ScoreDefined) -> None:
        """Reports progress, with the training seed added to the names of arms."""
        if isinstance(event, ArmPlayed) and self.train_seeds is not None:
            event = replace(event, controller=f"{event.controller} of training seed {seed}")
        if self.progress is not None:
            self.progress(event)

    def _by_seed(self, results: Results) -> list[Results]:
        """Splits the saved rounds, which are counted through all training seeds, by training seed."""
        by_seed: list[Results] = [{arm.name: {} for arm in self.arms} for _ in self.seeds]
        for name, rounds in results.items():
            for number, hosts in rounds.items():
                index, number_of_seed = divmod(number, self.rounds)
                by_seed[index][name][number_of_seed] = hosts
        return by_seed

    def _analyse(self) -> ComparisonResult | None:
        """Returns the result of what every arm has finished; None if there is nothing."""
        # Only whole training seeds count; without them, every complete round does.
        counted = list(self.seeds)
        finished_seeds: int | None = None
        if self.train_seeds is not None:
            counted = list(filter(self._has_finished, self.seeds))
            finished_seeds = len(counted)

        hosts: dict[str, list[HostResult]] = {arm.name: [] for arm in self.arms}
        for index in counted:
            played = in_order(self.results[index], self.pairs)
            for name in hosts:
                hosts[name] += played[name]
        if not hosts[self.reference]:
            return None
        return ComparisonResult(
            arms=self.arms,
            reference=self.reference,
            requested_pairs=self.pairs * (self.train_seeds or 1),
            hosts=hosts,
            metrics=analyse(
                hosts,
                self.reference,
                metrics_of(self.first.score),
                finished_seeds,
                alike=self.first.config.task.name in SIMULATED,
            ),
            folder=self.files.path,
            train_seeds=finished_seeds,
            requested_seeds=self.train_seeds,
            seconds=self.files.seconds(),
            width=self.width,
        )

    def close(self) -> None:
        """Stops all threads and closes the logs; a second call does nothing."""
        if self._next is not None:
            self._next.close()


class SeedComparison:
    """All arms of a comparison with one training seed: those that learn are runs, whose checkpoints then play as arms.

    The runs have their folders in that of the comparison. A finished run found there plays as it is; an unfinished one
    is continued.

    Raises ConfigError if an arm cannot be set up, or a run in the folder has another config than its arm.
    """

    def __init__(self, comparison: ComparisonRun, seed: int) -> None:
        self.comparison = comparison
        self.seed = seed
        self.task = comparison.first.task
        self.ranks = comparison.first.ranks
        arms = comparison.arms
        self.order = np.random.default_rng([seed, len(arms), comparison.order_seed])
        self.arms: list[Arm] = []
        self.baselines: dict[Any, Baseline] = {}
        self.folders: dict[str, Path] = {}
        """Run folders of the arms that learn."""
        self.experiments: dict[str, Experiment] = {}
        """Runs of those that have not finished learning."""
        self.runners: dict[str, ArmRunner] = {}
        # If an arm cannot be set up, those before it are closed.
        with ExitStack() as opened:
            for place, arm in enumerate(arms):
                arm = replace(arm, config=arm.config.with_values(run={"seed": seed}))
                self.arms.append(arm)
                with errors_name(arm):
                    if not arm.learns:
                        self.runners[arm.name] = opened.enter_context(closing(self._runner(arm)))
                        continue
                    run = comparison.files.path / f"seed-{seed}" / _folder_name(place, arm.name)
                    self.folders[arm.name] = run
                    experiment = self._experiment(arm, run)
                    if experiment is not None:
                        self.experiments[arm.name] = opened.enter_context(closing(experiment))
            self._opened = opened.pop_all()

    def _experiment(self, arm: Arm, folder: Path) -> Experiment | None:
        """Returns the run of a learning arm, from its last checkpoint if there is one; None if it is finished."""
        sinks = []
        learned = self.comparison.learned
        if learned is not None:
            sinks.append(_Rounds(arm.name, self.seed, learned))
        if not checkpoint.files(folder):
            if folder.exists():
                shutil.rmtree(folder)  # the comparison was killed before the run had a checkpoint
            return Experiment(arm.config, folder, sinks, self.task, ranks=self.ranks)
        _check_config(folder, arm.config)
        if checkpoint.newest(folder).state["finished"]:
            return None
        return Experiment.resume(folder, sinks, self.task or arm.config.task.name, ranks=self.ranks)

    def _runner(self, arm: Arm) -> ArmRunner:
        """Returns the runner of an arm on the held-out hosts of this seed."""
        maker = EnvMaker.of(arm.config, self.task, self.ranks)
        held_out = self.seed + HELD_OUT
        if arm.control_of is not None:
            return CONTROLS[arm.controller](maker, arm.control_of, held_out)
        if arm.alone:
            controller = ALONE
        elif arm.learns:
            controller = arm.spec.following(self.folders[arm.name])
        else:
            controller = self.comparison.files.follows(arm)
        return GrowingRunner(maker, controller, self.comparison.n_envs, held_out, self.baselines)

    def learn(self) -> None:
        """Trains the arms that learn, one after the other. Raises KeyboardInterrupt if one of them was stopped."""
        for experiment in self.experiments.values():
            if experiment.run(compared=False).interrupted:
                raise KeyboardInterrupt

    def ready(self) -> dict[str, ArmRunner]:
        """Returns the runners of all arms, in order; agents that have learned play greedily."""
        runners = {}
        for arm in self.arms:
            if arm.learns:
                self.runners[arm.name] = self._opened.enter_context(closing(self._runner(arm)))
            runners[arm.name] = self.runners[arm.name]
        return runners

    def close(self) -> None:
        """Stops all threads and closes the logs; a second call does nothing."""
        self._opened.close()


def _check_config(folder: Path, ours: TrainingConfig) -> None:
    """Raises ConfigError if the run in ``folder`` learned, or learns, with another config than ``ours``."""
    theirs = TrainingConfig.parse(read_toml(folder / CONFIG))
    different = []
    if not same_task(theirs.task.name, ours.task.name):
        different.append("task.name")
    recorded = theirs.model_dump()
    for section, values in ours.model_dump().items():
        for key, value in values.items():
            name = f"{section}.{key}"
            if recorded[section][key] != value and not MAY_DIFFER.fullmatch(name):
                different.append(name)
    if different:
        raise ConfigError(f"{folder} is a run with another {', '.join(different)}; give another --out")


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


def _require_free(folder: Path) -> None:
    """Raises ConfigError unless ``folder`` is missing, empty, or has only the runs of training seeds."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    if not names or not all(name.startswith("seed-") for name in names):
        require_empty(folder)


def resolved(arm: Arm, first: EnvMaker) -> Arm:
    """Returns the arm with all sizes that its config leaves to the task of ``first``. Raises ConfigError."""
    with errors_name(arm):
        maker = EnvMaker.of(arm.config, first.task, first.ranks)
    return replace(arm, config=maker.config)


def count_seeds(arms: Sequence[Arm], wanted: int | None) -> int | None:
    """Returns the number of training seeds; None if no arm learns. Raises ConfigError if ``wanted`` cannot be it."""
    learns = any(arm.learns for arm in arms)
    if wanted is None:
        return MIN_SEEDS if learns else None
    if not learns:
        raise ConfigError("training seeds are for arms that learn, and no arm does; add one, such as ppo")
    if wanted < 1:
        raise ConfigError(f"train_seeds is {wanted}; give 1 or more, and {MIN_SEEDS} for a verdict")
    return wanted
