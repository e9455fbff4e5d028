"""Controllers under one config on the same hosts, and the result of any comparison.

Nothing is saved while controllers play: this is the end of a run, and ``esper.compare_controllers``. Arms with configs
of their own, which are saved as they play, are compared by :mod:`esper.compare.comparison_run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from esper.agents.make import OwnController
from esper.agents.spec import ControllerSpec
from esper.compare.analysis import MetricResult
from esper.compare.arms import Arm
from esper.compare.runner import (
    ArmRunner,
    GrowingRunner,
    HostResult,
    Progress,
    Results,
    maker_of,
    play,
    split_pairs,
)
from esper.compare.statistics import MIN_SEEDS, Floats, PairedComparison, arm_of_copies, compare_pairs
from esper.config import ConfigError, TrainingConfig
from esper.core.state import Baseline
from esper.data.names import SIMULATED
from esper.data.task import Task
from esper.env.make import EnvMaker
from esper.files.system_info import describe_environment
from esper.run.rollout import one_thread
from esper.telemetry.text import trained_once
from esper.training.rng import HELD_OUT


@dataclass(frozen=True)
class ArmResult:
    """Results of one arm, one value per host in the order of the pairs; test accuracies of committed networks in pp."""

    controller: str
    accuracy: Floats
    parameters: Floats
    fossils: Floats
    alike: bool = False
    """Whether hosts do not differ from pair to pair, because they are simulated."""

    @property
    def columns(self) -> dict[str, Floats]:
        """The results by name, as in JSON."""
        return {"accuracy": self.accuracy, "parameters": self.parameters, "seeds_kept": self.fossils}

    @classmethod
    def of(cls, controller: str, hosts: Sequence[HostResult], alike: bool) -> ArmResult:
        return cls(
            controller,
            np.array([host.accuracy for host in hosts]),
            np.array([host.parameters for host in hosts]),
            np.array([host.fossils for host in hosts]),
            alike,
        )

    def against(self, other: ArmResult) -> PairedComparison:
        """Compares the accuracies of this arm with those of another one, pair by pair."""
        scores = {other.controller: other.accuracy, self.controller: self.accuracy}
        return compare_pairs(
            self.accuracy,
            other.accuracy,
            name_a=self.controller,
            name_b=other.controller,
            copies=arm_of_copies(scores) if self.alike else None,
        )


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
        named = {ControllerSpec.of(controller).name: controller for controller in controllers}
    if len(named) < len(controllers):
        raise ConfigError(f"a controller is given twice: {', '.join(named)}; name each, as in {{'mine': controller}}")
    for controller in named.values():
        ControllerSpec.of(controller).check()
    return play_held_out(maker_of(config, task), named, pairs, progress)


@one_thread()
def play_held_out(
    maker: EnvMaker,
    controllers: Mapping[str, str | OwnController],
    pairs: int,
    progress: Progress | None = None,
    baseline: Baseline | None = None,
    results: Results | None = None,
) -> list[ArmResult]:
    """Plays ``controllers`` on ``pairs`` held-out hosts of the run seed, which no agent learns on.

    Args:
        baseline: the no-growth baseline; None: that of the config's run seed, measured once.
        results: rounds that are not played again; new ones are added before ``progress`` is called.
    """
    run_seed = maker.config.run.seed + HELD_OUT
    size = maker.config.env.n_envs
    _, n_envs = split_pairs(pairs, size)
    baselines: dict[Any, Baseline] = {}  # measured once for all arms
    arms: dict[str, ArmRunner] = {}
    with ExitStack() as stack:  # closes the arms before one that cannot be made
        shared = stack.enter_context(closing(maker.make(n_envs=n_envs)))  # the arms take turns in it
        for name, controller in controllers.items():
            arm = GrowingRunner(
                maker,
                controller,
                n_envs,
                run_seed,
                baselines,
                count_flops=False,
                env=shared,
            )
            arms[name] = stack.enter_context(closing(arm))
            if arm.env.baseline is None:
                arm.env.configure(baseline=baseline)
        order = np.random.default_rng([run_seed, len(arms)])
        hosts = play(arms, pairs, size, order, progress, results)
    alike = maker.config.task.name in SIMULATED
    return [ArmResult.of(name, of_arm, alike) for name, of_arm in hosts.items()]


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
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a host took, by arm; they are shown, and are no result."""
    width: int | None = None
    """Width of the hosts; None: the task's."""

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
        """Returns sentences on the limits of the intervals, and on why a verdict cannot be given."""
        sentences = []
        if self.train_seeds is not None and self.train_seeds < MIN_SEEDS:
            sentences.append(f"Fewer than {MIN_SEEDS} training seeds are always inconclusive.")
        # Agents that were trained elsewhere are one outcome of training.
        controllers = []
        names = []
        for arm in self.arms:
            if not arm.learns:
                controllers.append(arm.controller)
                names.append(arm.name)
        return sentences + trained_once(controllers, names)

    def plain(self) -> dict[str, Any]:
        """Returns everything, ready for JSON."""
        return {
            "task": self.task,
            "width": self.width,
            "seed": self.seed,
            "pairs": self.pairs,
            "pairs_asked": self.requested_pairs,
            "train_seeds": self.train_seeds,
            "train_seeds_asked": self.requested_seeds,
            "notes": self.caveats(),
            "reference": self.reference,
            "arms": {arm.name: self._plain_arm(arm) for arm in self.arms},
            "metrics": [result.plain() for result in self.metrics],
            "environment": environment_without_paths(),
        }

    def score(self) -> dict[str, Any]:
        """Returns all but the arms with their hosts and the environment, ready for JSON: the score of an agent."""
        score = self.plain()
        del score["arms"]
        del score["environment"]
        return score

    def _plain_arm(self, arm: Arm) -> dict[str, Any]:
        """Returns an arm, the values of its hosts by metric, and the hosts, ready for JSON."""
        hosts = self.hosts[arm.name]
        values = {}
        for result in self.metrics:
            values[result.metric.name] = result.metric.values(hosts).tolist()
        return {
            **arm.plain(),
            "values": values,
            "hosts": [host.plain() for host in hosts],
        }


def environment_without_paths() -> dict[str, Any]:
    """Describes the environment, with the names of compiled modules only, so that two result files can be compared."""
    environment = describe_environment()
    return {**environment, "modules": sorted(environment["modules"])}
