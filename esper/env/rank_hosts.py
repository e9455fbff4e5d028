"""The hosts of a rank other than the first: what rank 0's ``RankedBackend`` calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from esper.config import RunConfig, TrainingConfig
from esper.config.resolved import HostTrainingConfig
from esper.data.task import DataOptions, Task
from esper.data.tasks import load_task
from esper.env.backend import Rollbacks
from esper.env.catalog import BlueprintCatalog
from esper.env.start import started
from esper.env.state import EnvState, table_of, write_table
from esper.env.training_backend import TrainingBackend, make_trainings
from esper.hosts.sizes import at_width
from esper.lifecycle.slots import Bools, Floats, Slots
from esper.seeds.blueprints import BLUEPRINTS
from esper.spaces.action import ActionSpec
from esper.telemetry.event import Event, MicroBatchHalved
from esper.telemetry.span import Spans
from esper.training.execution import workspaces
from esper.training.execution.faults import is_expected
from esper.training.execution.ranks import RunRanks
from esper.training.execution.tiers import make_executor, prepare_hosts
from esper.training.host_state import host_state
from esper.training.host_trainer import HostTrainer
from esper.training.micro_batching import MicroBatchPolicy
from esper.training.placement import copies_to_pin

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


@dataclass(frozen=True)
class Reply:
    """Result of a call, and the splits of batches because memory ran out during it."""

    result: Any
    splits: tuple[MicroBatchHalved, ...] = ()


OF_BACKEND = frozenset(
    {
        "reset",
        "plant",
        "remove",
        "shapley",
        "of_each",
        "state_dict",
    }
)
"""Methods of a backend that rank 0 calls as they are."""


class RankHosts:
    """One group of hosts of this rank, with the state of their envs as rank 0 sent it last."""

    def __init__(
        self,
        group: HostGroup,
        task: Task,
        run: RunConfig,
    ) -> None:
        count = len(group.indices)
        self.splits: list[Event] = []
        self.policy = MicroBatchPolicy(group.config)
        self.policy.on_split = self.splits.append
        self.backend = _make_hosts(group, task, run, self.policy)
        self.state = EnvState.fresh(count, slots=Slots.fresh(count, len(group.spec.slots)))
        self.all = slice(0, count)

    def answer(
        self,
        method: str,
        micro_batches: int,
        *arguments: Any,
    ) -> Reply:
        """Calls a method of the backend, or one of these, which need the state of envs or one host."""
        # Another rank may have run out of memory since, and all split batches alike.
        self.policy.restore(micro_batches)
        self.splits.clear()
        owner = self.backend if method in OF_BACKEND else self
        result = getattr(owner, method)(*arguments)
        splits = tuple(event for event in self.splits if isinstance(event, MicroBatchHalved))
        return Reply(result, splits)

    def epoch(self, active: Bools, table: Floats) -> Epoch:
        """Trains, validates and governs; returns the state after validation, that after governing, and rollbacks."""
        write_table(self.state, self.all, table)
        self.backend.train(active, self.state)
        self.backend.measure(active, self.state)
        measured = table_of(self.state, self.all)
        rollbacks = self.backend.govern(active, self.state)
        governed = table_of(self.state, self.all)
        return measured, governed, rollbacks

    def measure(self, active: Bools, table: Floats) -> Epoch:
        """Validates new hosts, which are not governed yet."""
        write_table(self.state, self.all, table)
        self.backend.measure(active, self.state)
        measured = table_of(self.state, self.all)
        return measured, measured, {}

    def take_first_snapshots(self, starting: Bools, table: Floats) -> None:
        write_table(self.state, self.all, table)
        self.backend.take_first_snapshots(starting, self.state)

    def test_accuracy(self) -> Floats:
        return self.backend.test_accuracy(self.state)

    def host_state(self, row: int) -> Any:
        return host_state(self.backend.each[row].training)

    def load_state_dict(self, saved: Any, table: Floats) -> None:
        write_table(self.state, self.all, table)
        self.backend.load_state_dict(saved, self.state)


def _make_hosts(
    group: HostGroup,
    task: Task,
    run: RunConfig,
    policy: MicroBatchPolicy,
) -> TrainingBackend:
    """Makes the hosts of ``group`` on the executor of ``run``, as rank 0 makes its own."""
    count = len(group.indices)
    training = make_trainings([task] * count, [group.config] * count, group.indices)
    executor = make_executor(run, task.device)
    try:
        prepare_hosts(run, training, executor)
        host = training[0].host
        catalog = BlueprintCatalog(host.topology, host.sites, BLUEPRINTS.copy(), group.spec)
        largest = catalog.max_parameters(group.config.env.parameter_budget * host.parameter_count)
        pinned = copies_to_pin(run, training, largest)
        trainer = HostTrainer(task, training, executor, policy)
        return TrainingBackend(trainer, catalog, Spans(), pinned, group.governed)
    except BaseException:
        executor.close()
        raise


class RankServer:
    """Makes and keeps the groups of hosts of one rank.

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
            self.ranks.serve(self.handle, is_expected)
        finally:
            for group in self.groups.values():
                group.backend.close()

    def handle(
        self,
        name: int,
        method: str,
        micro_batches: int,
        *arguments: Any,
    ) -> Reply:
        """Executes a call for the group ``name``."""
        if method == "load":
            (config,) = arguments
            self.tasks.pop(self._key(config), None)  # its hosts may have had another width
            self._task_of(config)
        elif method == "widen":
            config, width = arguments
            task = self._task_of(config)
            self.tasks[self._key(config)] = task.with_hosts(at_width(task.build_host, width))
        elif method == "apply":
            config, function, more = arguments
            task = self._task_of(config)
            of_rank = config.model_copy(update={"run": self.ranks.own(config.run)})
            return Reply(function(task, of_rank, *more))
        elif method == "make":
            (group,) = arguments
            task = self._task_of(group.config)
            self.groups[name] = RankHosts(group, task, self.ranks.own(group.config.run))
        elif method == "close":
            self.groups.pop(name).backend.close()
        else:
            return self.groups[name].answer(method, micro_batches, *arguments)
        return Reply(None)

    def _task_of(self, config: TrainingConfig) -> Task:
        """Returns the task of a config on this rank's device."""
        key = self._key(config)
        if key in self.tasks:
            return self.tasks[key]
        task = self.task or load_task(config.task.name, DataOptions.of(config.task))
        task = started(task, config.task.start)
        device = torch.device(key[2])
        if device.type == "cuda":
            workspaces.bound()  # before anything uses cuBLAS
        self.tasks[key] = task.to(device)
        return self.tasks[key]

    def _key(self, config: TrainingConfig) -> tuple[str, str, str]:
        return config.task.name, config.task.start, self.ranks.own(config.run).device
