"""All arms of a comparison with one training seed: those that learn are runs, whose checkpoints then play as arms."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from esper.agents.spec import ALONE
from esper.compare.arms import Arm
from esper.compare.controls import CONTROLS
from esper.compare.runner import ArmRunner, GrowingRunner
from esper.config import ConfigError, TrainingConfig, read_toml
from esper.data.user_code import same_task
from esper.env.make import EnvMaker
from esper.env.state import Baseline
from esper.files import checkpoint
from esper.files.run_folder import CONFIG
from esper.run.experiment import Experiment
from esper.telemetry.event import Event, RoundCompleted
from esper.telemetry.sink import Sink
from esper.training.rng import HELD_OUT

Learned = Callable[[str, int, RoundCompleted], None]
"""Receives the name of an arm, its training seed, and each round that it has learned from."""

MAY_DIFFER = re.compile(r"task\.(name|data)|run\.(device|lanes|evaluation_pairs|checkpoint_.*)|(track|anomaly)\..*")
"""Values of a run's config that do not change what its agent learns; names of tasks are compared on their own."""


class SeedComparison:
    """Sets up all arms with one training seed.

    Args:
        arms: with resolved configs; the seed takes the place of their own.
        folder: where learning arms have their run folders. A finished run found there plays as it is; an unfinished one
            is continued.
        first: maker of the envs of the first arm; its task and ranks are those of all.
        n_envs: number of hosts per round.
        learned: called after each round that an arm has learned from.
        order_seed: seed of the order in which arms take turns; no result depends on it.
        follows: returns an arm's controller, with the path of what it follows.

    Raises:
        ConfigError: an arm cannot be set up, or a run in ``folder`` has another config than its arm.
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
        self.task = first.task
        self.ranks = first.ranks
        self.order = np.random.default_rng([seed, len(arms), order_seed])
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
                    run = folder / _folder_name(place, arm.name)
                    self.folders[arm.name] = run
                    experiment = self._experiment(arm, run)
                    if experiment is not None:
                        self.experiments[arm.name] = opened.enter_context(closing(experiment))
            self._opened = opened.pop_all()

    def _experiment(self, arm: Arm, folder: Path) -> Experiment | None:
        """Returns the run of a learning arm, from its last checkpoint if there is one; None if it is finished."""
        sinks = []
        if self.learned is not None:
            sinks.append(_Rounds(arm.name, self.seed, self.learned))
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
            controller = self.follows(arm)
        return GrowingRunner(maker, controller, self.n_envs, held_out, self.baselines)

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
