"""The hosts of a rank other than the first: what rank 0's ``RankedBackend`` calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from esper.config import RunConfig, TrainingConfig
from esper.config.resolved import HostTrainingConfig
from esper.core.action import ActionSpec
from esper.core.blueprints import BLUEPRINTS
from esper.core.slots import Bools, Floats, Slots
from esper.core.state import EnvState, table_of, write_table
from esper.data.task import DataOptions, Task
from esper.data.tasks import load_task
from esper.env.backend import Rollbacks
from esper.env.catalog import BlueprintCatalog
from esper.env.start import started
from esper.env.training_backend import TrainingBackend, make_trainings
from esper.hosts.sizes import at_width
from esper.telemetry.span import Spans
from esper.training.execution.capabilities import bound_workspaces
from esper.training.execution.ranks import RunRanks
from esper.training.execution.tiers import make_executor, prepare_hosts
from esper.training.host_state import host_state
from esper.training.host_trainer import HostTrainer

Epoch = tuple[Floats, Floats, Rollbacks]
"""The tables of envs after validation and after governing, and the rollbacks."""


@dataclass(frozen=True)
class HostGroup:
    """Everything that a rank needs to make its part of a group of hosts."""

    config: HostTrainingConfig
    spec: ActionSpec
    indices: tuple[int, ...]
    """Env indices of its hosts."""
    governed: bool


class RankHosts(TrainingBackend):
    """One group of hosts of this rank, on the executor of ``run``, with the state of their envs as rank 0 sent it last.

    Methods that take a table of that state stand for those of a backend that take the state itself.
    """

    def __init__(
        self,
        group: HostGroup,
        task: Task,
        run: RunConfig,
    ) -> None:
        count = len(group.indices)
        self.state = EnvState.fresh(count, slots=Slots.fresh(count, len(group.spec.slots)))
        self.all = slice(0, count)
        training = make_trainings([task] * count, [group.config] * count, group.indices)
        executor = make_executor(run, task.device)
        try:
            prepare_hosts(run, training, executor)
            host = training[0].host
            catalog = BlueprintCatalog(host.topology, host.sites, BLUEPRINTS.copy(), group.spec)
            trainer = HostTrainer(task, training, executor)
            super().__init__(trainer, catalog, Spans(), group.governed)
        except BaseException:
            executor.close()
            raise

    def epoch(self, active: Bools, table: Floats) -> Epoch:
        """Trains, validates and governs; returns the state after validation, that after governing, and rollbacks."""
        write_table(self.state, self.all, table)
        self.train(active, self.state)
        self.measure(active, self.state)
        measured = table_of(self.state, self.all)
        rollbacks = self.govern(active, self.state)
        governed = table_of(self.state, self.all)
        return measured, governed, rollbacks

    def measure_new(self, active: Bools, table: Floats) -> Epoch:
        """Validates new hosts, which are not governed yet."""
        write_table(self.state, self.all, table)
        self.measure(active, self.state)
        measured = table_of(self.state, self.all)
        return measured, measured, {}

    def snapshot_new(self, starting: Bools, table: Floats) -> None:
        write_table(self.state, self.all, table)
        self.take_first_snapshots(starting, self.state)

    def test(self) -> Floats:
        return self.test_accuracy(self.state)

    def host_state(self, row: int) -> Any:
        return host_state(self.hosts[row].training)

    def resume(self, saved: Any, table: Floats) -> None:
        write_table(self.state, self.all, table)
        self.load_state_dict(saved, self.state)


class RankServer:
    """Makes and keeps the groups of hosts of one rank. Rank 0 calls its methods.

    Args:
        task: what hosts are trained on; None: the task that rank 0 names, loaded once.
    """

    def __init__(self, ranks: RunRanks, task: Task | None = None) -> None:
        self.ranks = ranks
        self.task = task
        self.groups: dict[int, RankHosts] = {}
        self.tasks: dict[tuple[str, str, str], Task] = {}
        """The tasks in use, by name, start and device."""

    def serve(self) -> None:
        """Trains hosts for rank 0 until it dismisses this rank. Raises RankLost if rank 0 is gone."""
        torch.set_num_threads(1)  # as rank 0: initial weights depend on it
        try:
            self.ranks.serve(self)
        finally:
            for group in self.groups.values():
                group.close()

    def load(self, config: TrainingConfig) -> None:
        """Loads the task of ``config`` anew: its hosts may have had another width."""
        self.tasks.pop(self._key(config), None)
        self._task_of(config)

    def widen(self, config: TrainingConfig, width: int) -> None:
        """Gives the task's hosts another width."""
        task = self._task_of(config)
        self.tasks[self._key(config)] = task.with_hosts(at_width(task.build_host, width))

    def apply(
        self,
        config: TrainingConfig,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> Any:
        """Returns ``function`` of the task, of the config with the workers and device of this rank, and of more."""
        own = config.model_copy(update={"run": self.ranks.own(config.run)})
        return function(self._task_of(config), own, *arguments)

    def make(self, name: int, group: HostGroup) -> None:
        """Makes the group ``name``."""
        run = self.ranks.own(group.config.run)
        self.groups[name] = RankHosts(group, self._task_of(group.config), run)

    def call_group(
        self,
        name: int,
        method: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """Calls a method of :class:`RankHosts` on the group ``name``."""
        return method(self.groups[name], *arguments)

    def close(self, name: int) -> None:
        """Frees the group ``name``."""
        self.groups.pop(name).close()

    def _task_of(self, config: TrainingConfig) -> Task:
        """Returns the task of a config on this rank's device."""
        key = self._key(config)
        if key in self.tasks:
            return self.tasks[key]
        task = self.task or load_task(config.task.name, DataOptions.of(config.task))
        task = started(task, config.task.start)
        device = torch.device(key[2])
        if device.type == "cuda":
            bound_workspaces()  # before anything uses cuBLAS
        self.tasks[key] = task.to(device)
        return self.tasks[key]

    def _key(self, config: TrainingConfig) -> tuple[str, str, str]:
        return config.task.name, config.task.start, self.ranks.own(config.run).device
