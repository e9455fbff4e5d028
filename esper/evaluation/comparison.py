"""Comparisons on the same hosts: of controllers under one config, and of arms that have their own.

The first kind is held in memory: the end of a run, `esper eval` and ``esper.compare_controllers``. The second, `esper
compare`, is saved as it goes and can be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from esper.config import ConfigError, TrainingConfig
from esper.data.task import Task
from esper.data.user_task import confirmed_task
from esper.env.baseline import Baseline
from esper.env.make import EnvMaker
from esper.evaluation.analysis import MetricResult, analyse, metrics_of
from esper.evaluation.arms import ALONE, Arm
from esper.evaluation.controls import CONTROLS
from esper.evaluation.folder import RESULTS, WHOLE, ComparisonFolder, Part
from esper.evaluation.runner import (
    HELD_OUT,
    ArmRunner,
    GrowingRunner,
    HostResult,
    MakeController,
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
from esper.evaluation.statistics import MIN_SEEDS, Floats, PairedComparison, compare_pairs
from esper.files.atomic import write_json
from esper.files.run_folder import require_empty
from esper.files.system_info import check_devices, describe_environment
from esper.rollout.interrupt import termination_interrupts
from esper.rollout.own_controller import OwnController, name_of
from esper.rollout.policies import check_name, controller_for
from esper.rollout.threads import one_thread
from esper.telemetry.text import trained_once
from esper.telemetry.workload import Phase, Workload
from esper.training.execution.ranks import RunRanks


@dataclass(frozen=True)
class ArmResult:
    """Results of one arm, one value per host in the order of the pairs; test accuracies of committed networks in pp."""

    controller: str
    accuracy: Floats
    parameters: Floats
    fossils: Floats

    @property
    def columns(self) -> dict[str, Floats]:
        """The results by name, as in JSON."""
        return {"accuracy": self.accuracy, "parameters": self.parameters, "seeds_kept": self.fossils}

    @classmethod
    def of(cls, controller: str, hosts: Sequence[HostResult]) -> ArmResult:
        columns = zip(*((host.accuracy, host.parameters, host.fossils) for host in hosts), strict=True)
        return cls(controller, *(np.array(column) for column in columns))

    def against(self, other: ArmResult) -> PairedComparison:
        """Compares the accuracies of this arm with those of another one, pair by pair."""
        return compare_pairs(self.accuracy, other.accuracy, name_a=self.controller, name_b=other.controller)


def compare_controllers(
    config: TrainingConfig,
    controllers: Sequence[str | OwnController] | Mapping[str, str | OwnController],
    pairs: int = 10,
    progress: Progress | None = None,
    task: Task | None = None,
) -> list[ArmResult]:
    """Plays ``controllers`` on ``pairs`` hosts with the same initial weights and the same batches.

    The hosts are the held-out hosts of ``run.seed``, the same ones that an agent's run with that seed ends with.

    Args:
        config: config of all arms.
        controllers: each by name or as a callable; a mapping gives them names of its own in the results.
        progress: called after each arm's round.
        task: what hosts are trained on; None: the task named in ``config``.

    Raises:
        ConfigError: a controller is unknown or repeated, or the config cannot run.
    """
    if isinstance(controllers, Mapping):
        named = dict(controllers)
    else:
        named = {name_of(controller): controller for controller in controllers}
    if len(named) < len(controllers):
        raise ConfigError(f"a controller is given twice: {', '.join(named)}; name each, as in {{'mine': controller}}")
    for controller in named.values():
        check_name(controller)
    check_devices(config.run.device)
    maker = EnvMaker.of(config, task)
    seed = config.run.seed + HELD_OUT
    made = {name: partial(controller_for, each, maker.config, run_seed=seed) for name, each in named.items()}
    return play_arms(maker, made, pairs, seed, progress)


@one_thread()
def play_arms(
    maker: EnvMaker,
    controllers: Mapping[str, MakeController],
    pairs: int,
    run_seed: int,
    progress: Progress | None = None,
    baseline: Baseline | None = None,
    results: Results | None = None,
    work: Workload | None = None,
) -> list[ArmResult]:
    """Plays the hosts of ``run_seed`` with every controller: pair i is the same (env, episode) for each of them.

    Args:
        baseline: the no-growth baseline; None: that of the config's run seed, measured once.
        results: results so far. Rounds found here are not played again; each new one is stored here before ``progress``
            is called.
        work: counts what is done.
    """
    work = work or Workload()
    results = {name: {} for name in controllers} if results is None else results
    rounds, n_envs = split_pairs(pairs, maker.config.env.n_envs)
    runners: dict[str, GrowingRunner] = {}
    baselines: dict[Any, Baseline] = {}
    with ExitStack() as opened:
        for name, make in controllers.items():
            runner = GrowingRunner(maker, make, n_envs, run_seed, baselines, count_flops=False)
            runners[name] = opened.enter_context(closing(runner))
        for runner in runners.values():
            runner.env.baseline = runner.env.baseline or baseline
        work.pause()
        prepare_arms(runners, ALONE, n_envs, maker.config.env.episode_length, work)
        order = np.random.default_rng([run_seed, len(controllers)])
        play_rounds(runners, range(rounds), order, results, progress, work=work)
    return [ArmResult.of(name, hosts) for name, hosts in in_order(results, pairs).items()]


@dataclass(frozen=True)
class ComparisonResult:
    """Result of a comparison so far: all arms on the same pairs, complete rounds only."""

    arms: tuple[Arm, ...]
    reference: str
    requested_pairs: int
    hosts: dict[str, list[HostResult]]
    """Results of the hosts by arm, in the order of the pairs."""
    metrics: list[MetricResult]
    folder: Path
    train_seeds: int | None = None
    """Number of training seeds that every arm has finished; None if no arm learns."""
    requested_seeds: int | None = None

    @property
    def pairs(self) -> int:
        return len(self.hosts[self.reference])

    @property
    def task(self) -> str:
        return self.arms[0].config.task.name

    @property
    def seed(self) -> int:
        return self.arms[0].config.run.seed

    def caveats(self) -> list[str]:
        """Returns what the intervals do not cover, and why a verdict cannot be given, as sentences."""
        few = self.train_seeds is not None and self.train_seeds < MIN_SEEDS
        fixed = [arm for arm in self.arms if not arm.learns]
        return [
            *([f"Fewer than {MIN_SEEDS} training seeds are always inconclusive."] if few else []),
            *trained_once([arm.controller for arm in fixed], [arm.name for arm in fixed]),
        ]

    def plain(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "seed": self.seed,
            "pairs": self.pairs,
            "pairs_asked": self.requested_pairs,
            "train_seeds": self.train_seeds,
            "train_seeds_asked": self.requested_seeds,
            "notes": self.caveats(),
            "reference": self.reference,
            "arms": {
                arm.name: {
                    **arm.plain(),
                    "values": {
                        found.metric.name: found.metric.values(self.hosts[arm.name]).tolist() for found in self.metrics
                    },
                    "hosts": [host.plain() for host in self.hosts[arm.name]],
                }
                for arm in self.arms
            },
            "metrics": [found.plain() for found in self.metrics],
            "environment": environment_without_paths(),
        }


def environment_without_paths() -> dict[str, Any]:
    """Describes the environment, with the names of compiled modules only, so that two result files can be compared."""
    environment = describe_environment()
    return {**environment, "modules": sorted(environment["modules"])}


class ComparisonRun:
    """Compares arms on the same hosts; it is set up completely before anything is written or played.

    The hosts are the held-out hosts of the seed, the same ones that an agent's run with that seed ends with.

    Args:
        arms: two or more, see ``read_arms``.
        pairs: number of hosts of each arm.
        folder: output folder; must be empty or not exist yet.
        reference: the arm that the others are compared with; None: the first that leaves hosts alone, else the last.
        progress: called after each arm's round.
        task: what hosts are trained on; None: the task named in the config.
        order_seed: seed of the order in which arms take turns; no result depends on it.
        results: rounds that are already saved in ``folder``, see :meth:`resume`; None: a new comparison.
        work: counts what is done, and estimates the time that is left.
        ranks: the ranks that hosts are spread over, on rank 0; None: all train in this process.
        part: which rounds are played; the results are those of all parts once they are merged.

    Raises:
        ConfigError: there are fewer than two arms, the reference is not one of them, or an arm cannot be set up.
    """

    @one_thread()
    def __init__(
        self,
        arms: Sequence[Arm],
        pairs: int,
        folder: Path | str,
        reference: str | None = None,
        progress: Progress | None = None,
        task: Task | None = None,
        order_seed: int = 0,
        results: Results | None = None,
        work: Workload | None = None,
        ranks: RunRanks | None = None,
        part: Part = WHOLE,
    ) -> None:
        self.reference = reference_of(arms, reference)
        self.files = ComparisonFolder(Path(folder))
        self.resumed = results is not None
        if not self.resumed:
            require_empty(self.files.path)
        self.results: Results = results or {arm.name: {} for arm in arms}
        self.pairs, self.progress, self.train_seeds = pairs, progress, None
        self.result: ComparisonResult | None = None
        """Result of the rounds that every arm has finished; set when :meth:`run` ends in any way."""
        check_devices(arms[0].config.run.device)
        first = EnvMaker.of(arms[0].config, task, whole_messages(ranks))
        self.score = first.score
        """Display format of the score of hosts."""
        rounds, n_envs = split_pairs(pairs, first.config.env.n_envs)
        self.part, self.rounds = part, part.of(rounds, f"rounds of {n_envs} hosts")
        seed = first.config.run.seed + HELD_OUT
        self.order = np.random.default_rng([seed, len(arms), order_seed])
        baselines: dict[Any, Baseline] = {}
        self.runners: dict[str, ArmRunner] = {}
        self.arms: tuple[Arm, ...] = ()
        with ExitStack() as opened:
            for arm in arms:
                try:
                    maker = EnvMaker.of(arm.config, first.task, ranks)
                    runner = opened.enter_context(closing(make_runner(arm, maker, n_envs, seed, baselines)))
                except ConfigError as error:
                    raise ConfigError(f"arm {arm.name!r}: {error}") from None
                self.runners[arm.name] = runner
                self.arms += (replace(arm, config=maker.config),)
            self._opened = opened.pop_all()
        self.n_envs, self.epochs, self.work = n_envs, first.config.env.episode_length, work or Workload()
        alone = {arm.name: arm.alone for arm in arms}
        baseline = 0 if first.task is None else first.config.env.baseline_episodes * self.epochs
        played = arms_work(alone, len(self.rounds), n_envs, self.epochs)
        self.work.add([Phase("baseline", baseline), played])

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        progress: Progress | None = None,
        task: Task | str | None = None,
        reference: str | None = None,
        controllers: Sequence[str] = (),
        work: Workload | None = None,
        ranks: RunRanks | None = None,
    ) -> ComparisonRun:
        """Returns a comparison that continues after the last saved round, and ends as if it had never stopped.

        A completed one is only analysed again, for example against another ``reference``. A user-defined task or
        controller is code, and is never run just because a folder names it: pass the task again in ``task``, as itself
        or its name, and the names of such controllers in ``controllers``.

        Raises:
            ConfigError: there is no comparison in the folder, its arms can no longer be set up, ``reference`` is not
                one of them, or a user-defined task or controller is not named.
        """
        files = ComparisonFolder(Path(folder))
        arms, pairs, first_reference, train_seeds, part = files.settings(controllers)
        if train_seeds is not None:
            raise ConfigError(
                f"arms of {folder} learn: resume it with esper.run.learning_comparison.LearningComparison"
            )
        given = task if isinstance(task, Task) else None
        arms = with_confirmed_task(arms, task, folder)
        results = files.results([arm.name for arm in arms])
        named = reference or first_reference
        return cls(arms, pairs, folder, named, progress, given, results=results, work=work, ranks=ranks, part=part)

    @one_thread()
    def run(self) -> ComparisonResult:
        """Plays the remaining rounds and writes the results.

        On an interrupt (Ctrl-C, SIGTERM) or an error, the results of all finished rounds are written before it is
        raised; they are also in :attr:`result`.
        """
        if not self.resumed:
            self.files.create(self.arms, self.pairs, self.reference, self.part)
        with closing(self), termination_interrupts():
            try:
                if not self.finished:
                    name_score(self.score, self.progress)
                    self.work.start()
                    alone = [arm.name for arm in self.arms if arm.alone]
                    prepare_arms(self.runners, alone, self.n_envs, self.epochs, self.work)
                save = self.files.save_round
                play_rounds(self.runners, self.rounds, self.order, self.results, self.progress, save, self.work)
            finally:
                self.result = self._analyse()
                if self.result is not None and self.part == WHOLE:
                    write_json(self.files.path / RESULTS, self.result.plain())
        assert self.result is not None
        return self.result

    @property
    def finished(self) -> bool:
        """Whether every arm has played all rounds."""
        return all(len(done) == len(self.rounds) for done in self.results.values())

    def _analyse(self) -> ComparisonResult | None:
        """Returns the result of the rounds that every arm has finished; None if there is none."""
        hosts = in_order(self.results, self.pairs)
        if not hosts[self.reference]:
            return None
        metrics = analyse(hosts, self.reference, metrics_of(self.score))
        return ComparisonResult(self.arms, self.reference, self.pairs, hosts, metrics, self.files.path)

    def close(self) -> None:
        """Stops the lanes; a second call does nothing."""
        self._opened.close()


def with_confirmed_task(arms: Sequence[Arm], task: Task | str | None, folder: Path | str) -> list[Arm]:
    """Returns the arms of a saved comparison, with the task as the user has named it again.

    Raises ConfigError if it is another one, or user-defined and not named.
    """
    name = task.name if isinstance(task, Task) else task
    confirmed = confirmed_task(arms[0].config.task.name, name, str(folder))
    return [replace(arm, config=arm.config.with_values(task={"name": confirmed})) for arm in arms]


def reference_of(arms: Sequence[Arm], named: str | None) -> str:
    """Returns the arm that the others are compared with: ``named``, else the first that leaves hosts alone, else the
    last. Raises ConfigError if there are fewer than two arms, or none of that name."""
    names = [arm.name for arm in arms]
    if len(arms) < 2:
        raise ConfigError(f"a comparison needs two or more --arm; got {f'only {names[0]}' if names else 'no arm'}")
    reference = named or next((arm.name for arm in arms if arm.alone), names[-1])
    if reference not in names:
        raise ConfigError(f"the reference must be one of the arms {', '.join(names)}; got {reference!r}")
    return reference


def make_runner(arm: Arm, maker: EnvMaker, n_envs: int, run_seed: int, baselines: dict[Any, Baseline]) -> ArmRunner:
    if arm.control_of is not None:
        return CONTROLS[arm.controller](maker, arm.control_of, run_seed)
    make = partial(controller_for, "none" if arm.alone else arm.controller, maker.config, run_seed=run_seed)
    return GrowingRunner(maker, make, n_envs, run_seed, baselines)
