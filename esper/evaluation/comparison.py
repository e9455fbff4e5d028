"""A comparison: set up as a whole, played round by round, saved as it goes, and analysed at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from esper.config import ConfigError, TrainingConfig
from esper.data.task import Task
from esper.data.user_task import confirmed_task
from esper.env.baseline import Baseline
from esper.env.make import EnvMaker
from esper.evaluation import analysis
from esper.evaluation.analysis import Findings
from esper.evaluation.arm_runner import HELD_OUT, GrowingSide, HostResult, MakePlayer, Side, play_rounds
from esper.evaluation.arms import ALONE, Arm
from esper.evaluation.controls import CONTROLS
from esper.evaluation.folder import ComparisonFolder, Played
from esper.evaluation.metrics import METRICS
from esper.files.system_info import check_devices, describe_environment
from esper.rollout.interrupt import termination_interrupts
from esper.rollout.policies import make_player
from esper.rollout.threads import one_thread
from esper.telemetry.event import ArmPlayed


@dataclass(frozen=True)
class Outcome:
    """Result of a comparison so far: all arms on the same pairs, complete rounds only."""

    arms: tuple[Arm, ...]
    reference: str
    asked: int
    """Number of pairs requested."""
    hosts: dict[str, list[HostResult]]
    """Results of the hosts by arm, in the order of the pairs."""
    findings: list[Findings]
    folder: Path

    @property
    def pairs(self) -> int:
        """Number of pairs played."""
        return len(self.hosts[self.reference])

    @property
    def task(self) -> str:
        return self.arms[0].config.task.name

    @property
    def seed(self) -> int:
        return self.arms[0].config.run.seed

    def plain(self) -> dict[str, Any]:
        """Returns everything, ready for JSON."""
        environment = describe_environment()
        environment["modules"] = sorted(environment["modules"])
        return {
            "task": self.task,
            "seed": self.seed,
            "pairs": self.pairs,
            "pairs_asked": self.asked,
            "reference": self.reference,
            "arms": {
                arm.name: {
                    "controller": arm.controller,
                    "of": arm.of,
                    "config": arm.config.model_dump(mode="json"),
                    "values": {metric.name: metric.values(self.hosts[arm.name]).tolist() for metric in METRICS},
                    "hosts": [host.plain() for host in self.hosts[arm.name]],
                }
                for arm in self.arms
            },
            "metrics": [analysis.plain(found) for found in self.findings],
            "environment": environment,
        }


def _ignore(_event: ArmPlayed) -> None:
    pass


def default_reference(arms: Sequence[Arm]) -> str:
    """Returns the first arm that leaves hosts alone, or else the last arm."""
    return next((arm.name for arm in arms if arm.controller in ALONE), arms[-1].name)


class Comparison:
    """Compares arms on the same hosts; it is set up completely before anything is written or played.

    The hosts are the held-out hosts of the seed, the same ones that an agent's run with that seed ends with.

    Args:
        arms: two or more, see ``read_arms``.
        pairs: number of hosts of each arm.
        folder: output folder; must be empty or not exist yet.
        reference: the arm that the others are compared with; None: :func:`default_reference`.
        progress: called after each arm's round.
        task: what hosts are trained on; None: the task named in the config.
        order_seed: seed of the order in which arms take turns; no result depends on it.

    Raises:
        ConfigError: there are fewer than two arms, or an arm cannot be set up.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        pairs: int,
        folder: Path | str,
        reference: str | None = None,
        progress: Callable[[ArmPlayed], None] = _ignore,
        task: Task | None = None,
        order_seed: int = 0,
    ) -> None:
        names = [arm.name for arm in arms]
        reference = reference or (default_reference(arms) if arms else None)
        if len(arms) < 2:
            raise ConfigError(f"a comparison needs two or more --arm; got {f'only {names[0]}' if names else 'no arm'}")
        if reference not in names:
            raise ConfigError(f"the reference must be one of the arms {', '.join(names)}; got {reference!r}")
        self.files = ComparisonFolder(Path(folder), resumed=False)
        self._set_up(arms, pairs, reference, progress, task, order_seed)
        self.played: Played = {name: {} for name in names}
        self._resumed = False

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        progress: Callable[[ArmPlayed], None] = _ignore,
        task: Task | str | None = None,
        reference: str | None = None,
    ) -> Comparison:
        """Returns a comparison that continues after the last saved round, and ends as if it had never stopped.

        A completed one is only analysed again, for example against another ``reference``. A user-defined task is code,
        and is never run just because a folder names it: pass it again in ``task``, as the task itself or its name.

        Raises:
            ConfigError: there is no comparison in the folder, its arms can no longer be set up, ``reference`` is not
                one of them, or a user-defined task is not named.
        """
        files = ComparisonFolder(Path(folder), resumed=True)
        arms, pairs, first = files.settings()
        reference = reference or first
        if reference not in (names := [arm.name for arm in arms]):
            raise ConfigError(f"the reference must be one of the arms {', '.join(names)}; got {reference!r}")
        given, name = (task, task.name) if isinstance(task, Task) else (None, task)
        confirmed = confirmed_task(arms[0].config.task.name, name, str(folder))
        arms = [replace(arm, config=arm.config.with_values(task={"name": confirmed})) for arm in arms]
        found = cls.__new__(cls)
        found.files = files
        found._set_up(arms, pairs, reference, progress, given, 0)
        found.played = files.played(names)
        found._resumed = True
        return found

    @one_thread()
    def _set_up(
        self,
        arms: Sequence[Arm],
        pairs: int,
        reference: str,
        progress: Callable[[ArmPlayed], None],
        task: Task | None,
        order_seed: int,
    ) -> None:
        self.reference, self.asked, self.progress = reference, pairs, progress
        self.outcome: Outcome | None = None
        """Result of the rounds that every arm has finished; set when :meth:`run` ends in any way."""
        check_devices(arms[0].config.run.device)
        first = EnvMaker.of(arms[0].config, task)
        makers = {arm.name: _maker(arm, first.task) for arm in arms}
        self.arms = tuple(replace(arm, config=makers[arm.name].config) for arm in arms)
        n_envs = first.config.env.n_envs
        self.rounds = -(-pairs // n_envs)
        # Fewest hosts per round that reach the pairs in this number of rounds, to play few surplus hosts.
        self.hosts_a_round = -(-pairs // self.rounds)
        run_seed = first.config.run.seed + HELD_OUT
        self.order = np.random.default_rng([run_seed, len(arms), order_seed])
        baselines: dict[Any, Baseline] = {}
        self.sides: dict[str, Side] = {}
        try:
            for arm in self.arms:
                self.sides[arm.name] = _side(arm, makers[arm.name], self.hosts_a_round, run_seed, baselines)
        except BaseException:
            self.close()
            raise

    @one_thread()
    def run(self) -> Outcome:
        """Plays the remaining rounds and writes the results.

        On an interrupt (Ctrl-C, SIGTERM) or an error, the results of all finished rounds are written before it is
        raised; they are also in :attr:`outcome`.
        """
        if not self._resumed:
            self.files.create(self.arms, self.asked, self.reference)
        with self, termination_interrupts():
            try:
                if any(len(done) < self.rounds for done in self.played.values()):
                    for side in self.sides.values():
                        side.prepare()
                play_rounds(self.sides, self.rounds, self.order, self.played, self.files.keep, self.progress)
            finally:
                self.outcome = self._finished()
                if self.outcome is not None:
                    self.files.write_results(self.outcome.plain())
        assert self.outcome is not None
        return self.outcome

    def _finished(self) -> Outcome | None:
        """Returns the result of the rounds that every arm has finished; None if there is none."""
        whole = [number for number in range(self.rounds) if all(number in done for done in self.played.values())]
        if not whole:
            return None
        hosts = {
            name: [host for number in whole for host in done[number]][: self.asked]
            for name, done in self.played.items()
        }
        findings = analysis.analyse(hosts, self.reference)
        return Outcome(self.arms, self.reference, self.asked, hosts, findings, self.files.path)

    def close(self) -> None:
        """Stops the lanes; a second call does nothing."""
        for side in self.sides.values():
            side.close()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _maker(arm: Arm, task: Task | None) -> EnvMaker:
    try:
        return EnvMaker.of(arm.config, task)
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name!r}: {error}") from None


def _side(arm: Arm, maker: EnvMaker, n_envs: int, run_seed: int, baselines: dict[Any, Baseline]) -> Side:
    try:
        if arm.controller in CONTROLS:
            assert arm.of is not None
            return CONTROLS[arm.controller](maker, arm.of, run_seed)
        return GrowingSide(maker, _player(arm, maker.config, run_seed), n_envs, run_seed, baselines)
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name!r}: {error}") from None


def _player(arm: Arm, config: TrainingConfig, run_seed: int) -> MakePlayer:
    return lambda env: make_player(arm.plays, config, env, run_seed)
