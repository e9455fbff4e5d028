"""A comparison of arms on the same hosts, saved as it goes: `esper compare`.

Arms that do not learn play the held-out hosts of the seed, the same ones that an agent's run with that seed ends with.
If an arm learns, all of this is done for several training seeds: each is one run of every learning arm, and what they
have learned is compared, with the other arms, on the held-out hosts of that seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from esper.config import ConfigError
from esper.data.task import Task
from esper.data.user_code import confirmed_task
from esper.env.make import EnvMaker
from esper.evaluation.analysis import analyse, metrics_of
from esper.evaluation.arms import Arm
from esper.evaluation.comparison import ComparisonResult
from esper.evaluation.folder import RESULTS, WHOLE, ComparisonFolder, Part, Settings
from esper.evaluation.runner import (
    HostResult,
    Progress,
    Results,
    Save,
    arms_work,
    in_order,
    name_score,
    split_pairs,
    whole_messages,
)
from esper.evaluation.statistics import MIN_SEEDS
from esper.files.atomic import write_json
from esper.files.claim import claimed
from esper.files.run_folder import require_empty
from esper.files.system_info import check_devices
from esper.rollout.interrupt import termination_interrupts
from esper.rollout.threads import one_thread
from esper.run.seed_comparison import Learned, SeedComparison, errors_name
from esper.telemetry.event import ArmPlayed, ScoreDefined
from esper.telemetry.workload import Workload
from esper.training.execution.ranks import RunRanks


class ComparisonRun:
    """Compares arms on the same hosts; it is set up before anything is written or played.

    Args:
        arms: two or more, see ``read_arms``.
        pairs: number of hosts of each arm; if an arm learns, of each training seed.
        folder: output folder; must be empty or not exist yet.
        reference: the arm that the others are compared with; None: the first that leaves hosts alone, else the last.
        train_seeds: number of training seeds, ``run.seed`` and those after it, if an arm learns; None: ``MIN_SEEDS``.
        progress: called after each arm's round on held-out hosts.
        learned: called after each round that an arm has learned from.
        task: what hosts are trained on; None: the task named in the config.
        order_seed: seed of the order in which arms take turns; no result depends on it.
        results: rounds that are already saved in ``folder``, see :meth:`resume`; None: a new comparison.
        work: counts what is done, and estimates the time that is left.
        ranks: the ranks that hosts are spread over, on rank 0; None: all train in this process.
        part: which rounds are played, or which training seeds if an arm learns; the results are those of all parts once
            they are merged.

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
        work: Workload | None = None,
        ranks: RunRanks | None = None,
        part: Part = WHOLE,
    ) -> None:
        self.reference, self.part, self.pairs = reference_of(arms, reference), part, pairs
        self.train_seeds = count_seeds(arms, train_seeds)
        """Number of training seeds; None if no arm learns."""
        self.files = ComparisonFolder(Path(folder))
        self.resumed = results is not None
        if not self.resumed:
            require_empty(self.files.path)
        check_devices(arms[0].config.run.device)
        first = self.first = EnvMaker.of(arms[0].config, task, whole_messages(ranks))
        self.arms = tuple(resolved(arm, first) for arm in arms)
        self.progress, self.learned, self.order_seed = progress, learned, order_seed
        self.all_rounds, self.n_envs = split_pairs(pairs, first.config.env.n_envs)
        self.seeds, self.rounds = part.share(self.all_rounds, self.n_envs, self.train_seeds)
        """The training seeds that are played here, counted from 0, and the rounds of each."""
        self.results = self._by_seed(results or {})
        """Results of each training seed, or the one of arms that do not learn."""
        self.result: ComparisonResult | None = None
        """Result of what every arm has finished, training seeds or rounds; set when :meth:`run` ends in any way."""
        self.work, left = work or Workload(), self._unfinished()
        self._next = self._open(left[0]) if left else None
        """The first training seed that is not finished, ready to be played."""
        alone, epochs = {arm.name: arm.alone for arm in arms}, first.config.env.episode_length
        self.work.add([arms_work(alone, len(self.rounds), self.n_envs, epochs)])
        self.work.repeat(len(left))

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
        work: Workload | None = None,
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
        files = ComparisonFolder(Path(folder))
        settings = files.settings(controllers)
        name = task.name if isinstance(task, Task) else task
        confirmed = confirmed_task(settings.arms[0].config.task.name, name, str(folder))
        arms = [replace(arm, config=arm.config.with_values(task={"name": confirmed})) for arm in settings.arms]
        return cls(
            arms,
            settings.pairs,
            folder,
            reference or settings.reference,
            train_seeds=settings.train_seeds,
            progress=progress,
            learned=learned,
            task=task if isinstance(task, Task) else None,
            results=files.results([arm.name for arm in arms]),
            work=work,
            ranks=ranks,
            part=settings.part,
        )

    @one_thread()
    def run(self) -> ComparisonResult:
        """Trains and plays what is left, and writes the results.

        On an interrupt (Ctrl-C, SIGTERM) or an error, the results of what every arm has finished are written before it
        is raised; they are also in :attr:`result`. While arms learn, an interrupt takes effect at the end of a step.
        """
        with claimed(self.files.path), closing(self), termination_interrupts():
            if not self.resumed:
                require_empty(self.files.path)
                self.files.create(Settings(self.pairs, self.reference, self.train_seeds, self.part, self.arms))
            try:
                if self._next is not None:
                    name_score(self.first.score, self.progress)
                self.work.start()
                for index in self._unfinished():
                    self._next = self._next or self._open(index)
                    with closing(self._next) as one:
                        one.run(self.pairs, self.rounds, self.results[index], self._save(index), self._tell(one.seed))
                    self._next = None
            finally:
                result = self.result = self._analyse()
                if result is not None and self.part == WHOLE:
                    write_json(self.files.path / RESULTS, result.plain())
        if result is None:
            raise RuntimeError(f"{self.files.path} has no round that every arm has finished")
        return result

    def _open(self, index: int) -> SeedComparison:
        seed = self.arms[0].config.run.seed + index
        folder = self.files.path / f"seed-{seed}"
        return SeedComparison(
            self.arms,
            seed,
            folder,
            self.first,
            self.n_envs,
            self.learned,
            self.work,
            self.order_seed,
            self.files.follows,
        )

    def _unfinished(self) -> list[int]:
        """Returns the training seeds that an arm has not finished, counted from 0."""
        return [i for i in self.seeds if any(len(own) < len(self.rounds) for own in self.results[i].values())]

    @property
    def finished(self) -> bool:
        """Whether every arm has played everything."""
        return not self._unfinished()

    def _save(self, index: int) -> Save:
        def save(arm: str, number: int, hosts: list[HostResult], seconds: float) -> None:
            self.files.save_round(arm, index * self.all_rounds + number, hosts, seconds)

        return save

    def _tell(self, seed: int) -> Progress:
        """Returns ``progress``, with the training seed added to the names of arms."""

        def tell(event: ArmPlayed | ScoreDefined) -> None:
            if isinstance(event, ArmPlayed) and self.train_seeds is not None:
                event = replace(event, controller=f"{event.controller}, training seed {seed},")
            if self.progress is not None:
                self.progress(event)

        return tell

    def _by_seed(self, results: Results) -> list[Results]:
        """Splits the saved rounds, which are counted through all training seeds, by training seed."""
        split: list[Results] = [{arm.name: {} for arm in self.arms} for _ in range(self.train_seeds or 1)]
        for name, own in results.items():
            for number, hosts in own.items():
                split[number // self.all_rounds][name][number % self.all_rounds] = hosts
        return split

    def _analyse(self) -> ComparisonResult | None:
        """Returns the result of what every arm has finished; None if there is nothing."""
        # Without training seeds, every complete round counts.
        left = [] if self.train_seeds is None else self._unfinished()
        done = [in_order(self.results[index], self.pairs) for index in self.seeds if index not in left]
        hosts = {arm.name: [host for seed in done for host in seed[arm.name]] for arm in self.arms}
        if not hosts[self.reference]:
            return None
        seeds = None if self.train_seeds is None else len(done)
        metrics = analyse(hosts, self.reference, metrics_of(self.first.score), seeds)
        asked = self.pairs * (self.train_seeds or 1)
        return ComparisonResult(
            self.arms,
            self.reference,
            asked,
            hosts,
            metrics,
            self.files.path,
            seeds,
            self.train_seeds,
            self.files.seconds(),
        )

    def close(self) -> None:
        """Stops all threads and closes the logs; a second call does nothing."""
        if self._next is not None:
            self._next.close()


def resolved(arm: Arm, first: EnvMaker) -> Arm:
    """Returns the arm with all sizes that its config leaves to the task of ``first``. Raises ConfigError."""
    with errors_name(arm):
        return replace(arm, config=EnvMaker.of(arm.config, first.task, first.ranks).config)


def count_seeds(arms: Sequence[Arm], wanted: int | None) -> int | None:
    """Returns the number of training seeds; None if no arm learns. Raises ConfigError if ``wanted`` cannot be it."""
    learns = any(arm.learns for arm in arms)
    if wanted is not None and not learns:
        raise ConfigError("training seeds are for arms that learn, and no arm does; add one, such as ppo")
    if wanted is not None and wanted < 1:
        raise ConfigError(f"train_seeds is {wanted}; give 1 or more, and {MIN_SEEDS} for a verdict")
    return None if not learns else MIN_SEEDS if wanted is None else wanted


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
