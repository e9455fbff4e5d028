"""Hosts spread over the ranks of a run: rank 0 has the state of all envs, and trains the first of their hosts.

An epoch takes one call: the other ranks receive the state of their envs, train, validate and govern, and send that
state back. All that decides, learns, logs and saves is on rank 0 and knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch

from esper.config import ConfigError, RunConfig, TrainingConfig
from esper.config.resolved import HostTrainingConfig, ResolvedConfig
from esper.core.action import ActionSpec
from esper.core.blueprints import BLUEPRINTS
from esper.core.slots import Bools, Floats, Ints, Slots
from esper.core.state import EnvState, table_of, write_changes, write_table
from esper.data.task import DataOptions, Task
from esper.data.tasks import load_task
from esper.env.backend import Backend, FinalScores, Merge, Release, Rollbacks
from esper.env.catalog import BlueprintCatalog
from esper.env.host_row import assign_roles
from esper.env.start import started
from esper.env.training_backend import TrainingBackend
from esper.hosts.sizes import at_width
from esper.telemetry.span import Spans
from esper.training.execution.capabilities import bound_workspaces
from esper.training.execution.ranks import RunRanks
from esper.training.execution.tiers import make_executor, prepare_hosts
from esper.training.executor import RankFailed, RankLost
from esper.training.host_state import host_state, load_host_state
from esper.training.host_trainer import HostTrainer, make_trainings
from esper.training.host_training import HostTraining

Step = tuple[Any, Floats]
"""The result of a method, and the table of envs after it."""


class RankGroup(TrainingBackend):
    """Some hosts of a rank other than the first, with the state of their envs as rank 0 sent it last."""

    state: EnvState

    def follow(
        self,
        table: Floats,
        methods: Sequence[Callable[..., Any]],
        *arguments: Any,
    ) -> list[Step]:
        """Calls methods of the backend in turn, with ``arguments`` and the state of which ``table`` is."""
        rows = slice(0, len(self.hosts))
        write_table(self.state, rows, table)
        steps = []
        for method in methods:
            result = method(self, *arguments, self.state)
            steps.append((result, table_of(self.state, rows)))
        return steps

    def host_state(self, row: int) -> Any:
        return host_state(self.hosts[row].training)


class RankHosts(RankGroup):
    """Hosts of one task.

    Args:
        task: what the hosts are trained on.
        config: that of the hosts; ``run`` has the workers and the device of this rank.
        indices: env indices of the hosts.
        governed: whether bad hosts are rolled back.
    """

    def __init__(
        self,
        task: Task,
        run: RunConfig,
        config: HostTrainingConfig,
        spec: ActionSpec,
        indices: Sequence[int],
        governed: bool,
    ) -> None:
        count = len(indices)
        self.state = EnvState.fresh(count, slots=Slots.fresh(count, len(spec.slots)))
        training = make_trainings([task] * count, [config] * count, indices)
        executor = make_executor(run, task.device)
        try:
            prepare_hosts(run, training, executor)
            host = training[0].host
            catalog = BlueprintCatalog(host.topology, host.sites, BLUEPRINTS.copy(), spec)
            trainer = HostTrainer(task, training, executor)
            super().__init__(trainer, catalog, Spans(), governed)
        except BaseException:
            executor.close()
            raise


class RankServer:
    """Makes and keeps the groups of hosts of one rank. Rank 0 calls its methods, and names the task."""

    def __init__(self, ranks: RunRanks) -> None:
        self.ranks = ranks
        self.groups: dict[int, RankGroup] = {}
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

    def make(
        self,
        name: int,
        config: HostTrainingConfig,
        *arguments: Any,
    ) -> None:
        """Makes the group ``name``; ``arguments`` are those of :class:`RankHosts` after the config."""
        run = self.ranks.own(config.run)
        self.groups[name] = RankHosts(self._task_of(config), run, config, *arguments)

    def call_group(
        self,
        name: int,
        method: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """Calls a method of :class:`RankGroup` on the group ``name``."""
        return method(self.groups[name], *arguments)

    def close(self, name: int) -> None:
        """Frees the group ``name``."""
        self.groups.pop(name).close()

    def _task_of(self, config: TrainingConfig) -> Task:
        """Returns the task of a config on this rank's device."""
        key = self._key(config)
        if key in self.tasks:
            return self.tasks[key]
        task = load_task(config.task.name, DataOptions.of(config.task))
        task = started(task, config.task.start)
        device = torch.device(key[2])
        if device.type == "cuda":
            bound_workspaces()  # before anything uses cuBLAS
        self.tasks[key] = task.to(device)
        return self.tasks[key]

    def _key(self, config: TrainingConfig) -> tuple[str, str, str]:
        return config.task.name, config.task.start, self.ranks.own(config.run).device


def shares_of_others(ranks: RunRanks, count: int) -> dict[int, slice]:
    """Returns which of ``count`` hosts each rank but the first has, of those that have some."""
    shares = {}
    for rank in range(1, ranks.size):
        share = ranks.share(count, rank)
        if share:
            shares[rank] = slice(share.start, share.stop)
    return shares


class RankedBackend(Backend):
    """The hosts of all ranks, on rank 0; the others have a :class:`RankHosts` each.

    Args:
        local: the hosts of this rank, the first ones.
        indices: env indices of all hosts, in the order of the arrays.
        config: that of all hosts.
        make: makes the hosts of another rank; it takes what :meth:`RankServer.make` does.
    """

    def __init__(
        self,
        ranks: RunRanks,
        local: TrainingBackend,
        config: ResolvedConfig,
        indices: range,
        make: Callable[..., None] = RankServer.make,
    ) -> None:
        self.ranks = ranks
        self.local = local
        self.count = len(indices)
        self.only_added = local.only_added
        self.at_once = local.at_once
        self.mine = slice(0, len(local.hosts))
        self.shares = shares_of_others(ranks, self.count)
        self.name = ranks.new_name()
        self._sent: dict[int, Floats] = {}
        """State of the envs that each other rank was sent last, by its first row."""
        self._governed: dict[int, tuple[Floats, Step]] = {}
        """By first row, of epochs whose rollbacks are not written yet: the state before governing, the rollbacks and
        the state after."""
        self._training = False
        """Whether the other ranks train an epoch whose results have not arrived."""

        calls = {}
        for rank, rows in self.shares.items():
            of_rank = tuple(indices[rows])
            calls[rank] = (make, self.name, config, local.catalog.spec, of_rank, local.governed)
        ranks.start(calls)
        ranks.finish()

    def reset(
        self,
        starting: Bools,
        run_seed: int,
        episodes: Ints,
    ) -> None:
        self._on_all(TrainingBackend.reset, starting, run_seed, episodes, where=starting)

    def plant(
        self,
        where: Bools,
        blueprint: Ints,
        style: Ints,
    ) -> tuple[Ints, dict[int, str]]:
        sizes = np.zeros((len(where), 1), dtype=np.int64)
        failures: dict[int, str] = {}
        for rows, (of_rows, failed) in self._on_all(TrainingBackend.plant, where, blueprint, style, where=where):
            sizes[rows] = of_rows
            for row, reason in failed.items():
                failures[rows.start + row] = reason
        return sizes, failures

    def remove(self, where: Bools) -> None:
        self._on_all(TrainingBackend.remove, where, where=where)

    def train(self, active: Bools, state: EnvState) -> None:
        """Trains an epoch; the other ranks go on to validate and govern without a further call."""
        _follow(self, active, state, TrainingBackend.train, TrainingBackend.measure, TrainingBackend.govern)
        self._training = True
        if active[self.mine].any():
            self.local.train(active[self.mine], state)

    def measure(self, active: Bools, state: EnvState) -> None:
        if not self._training:  # of new hosts
            _follow(self, active, state, TrainingBackend.measure, TrainingBackend.take_first_snapshots)
        self._training = False
        self.local.measure(active[self.mine], state)
        for rank, (*_, (_, measured), governed) in self.ranks.finish().items():
            rows = self.shares[rank]
            # The others have governed already, but here governing comes later.
            write_changes(state, rows, self._sent[rows.start], measured)
            self._governed[rows.start] = (measured, governed)

    def take_first_snapshots(self, starting: Bools, state: EnvState) -> None:
        self._governed.clear()  # the others have taken theirs
        self.local.take_first_snapshots(starting[self.mine], state)

    def govern(self, active: Bools, state: EnvState) -> Rollbacks:
        rollbacks = self.local.govern(active[self.mine], state)
        for rows in self.shares.values():
            if rows.start not in self._governed:
                continue
            measured, (of_rank, governed) = self._governed.pop(rows.start)
            write_changes(state, rows, measured, governed)
            for row, rollback in of_rank.items():
                rollbacks[rows.start + row] = rollback
        return rollbacks

    def merge(self, due: Bools, state: EnvState) -> dict[int, Merge]:
        methods = [TrainingBackend.merge]
        self._start(RankGroup.follow, lambda rows: (table_of(state, rows), methods, due[rows]), due)
        merges = self.local.merge(due[self.mine], state)
        for rank, ((of_rank, _),) in self.ranks.finish().items():
            for row, merge in of_rank.items():
                merges[self.shares[rank].start + row] = merge
        return merges

    def rebase(self, where: Bools, state: EnvState) -> None:
        methods = [TrainingBackend.rebase]
        self._start(RankGroup.follow, lambda rows: (table_of(state, rows), methods, where[rows]), where)
        self.local.rebase(where[self.mine], state)
        self.ranks.finish()

    def take_out(self, where: Bools) -> dict[int, Release]:
        releases = {}
        for rows, of_rank in self._on_all(TrainingBackend.take_out, where, where=where):
            for row, release in of_rank.items():
                releases[rows.start + row] = release
        return releases

    def test_accuracy(self, state: EnvState) -> Floats:
        methods = [TrainingBackend.test_accuracy]
        self._start(RankGroup.follow, lambda rows: (table_of(state, rows), methods))
        accuracies = [self.local.test_accuracy(state)]
        for ((accuracy, _),) in self.ranks.finish().values():
            accuracies.append(accuracy)
        return np.concatenate(accuracies)

    def final_scores(self, env: int) -> FinalScores:
        if env < self.mine.stop:
            return self.local.final_scores(env)
        scores: FinalScores = _of(self, env, RankGroup.final_scores)
        return scores

    def map_hosts(self, function: Callable[[Any], list[Any]]) -> list[Any]:
        return _joined(self._on_all(TrainingBackend.map_hosts, function))

    def state_dict(self) -> Any:
        return _joined(self._on_all(TrainingBackend.state_dict))

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        """Resumes. Raises KeyError or ValueError if ``saved`` belongs to different hosts."""
        if len(saved) != self.count:
            raise ValueError(f"it has {len(saved)} hosts, not {self.count}")
        methods = [TrainingBackend.load_state_dict]
        self._start(RankGroup.follow, lambda rows: (table_of(state, rows), methods, saved[rows]))
        self.local.load_state_dict(saved[self.mine], state)
        try:
            self.ranks.finish()
        except RankFailed as error:
            raise ValueError(str(error)) from error

    def release(self) -> None:
        """Has the other ranks free their hosts."""
        with suppress(RankFailed, RankLost, ConfigError):  # these were raised before, or do not matter any more
            self.ranks.start(dict.fromkeys(self.shares, (RankServer.close, self.name)))
            self.ranks.finish()

    def close(self) -> None:
        try:
            self.local.close()
        finally:
            self.release()

    def _start(
        self,
        method: Callable[..., Any],
        arguments: Callable[[slice], tuple[Any, ...]],
        where: Bools | None = None,
    ) -> None:
        """Calls ``method`` of the other ranks that have hosts of ``where`` bool [E, ...], with ``arguments`` of their
        rows, after the end of the call before."""
        calls = {}
        for rank, rows in self.shares.items():
            if where is None or where[rows].any():
                calls[rank] = (RankServer.call_group, self.name, method, *arguments(rows))
        # Without any, too: else its caller would take the replies to the call before for its own.
        self.ranks.start(calls)

    def _on_all(
        self,
        method: Callable[..., Any],
        *arguments: Any,
        where: Bools | None = None,
    ) -> list[tuple[slice, Any]]:
        """Calls ``method`` on the hosts of all ranks, with their rows of those arguments that are arrays; returns
        results with their rows, in the order of hosts."""

        def part(rows: slice) -> tuple[Any, ...]:
            return tuple(value[rows] if isinstance(value, np.ndarray) else value for value in arguments)

        self._start(method, part, where)
        results = [(self.mine, method(self.local, *part(self.mine)))]
        for rank, result in self.ranks.finish().items():
            results.append((self.shares[rank], result))
        return results


def copy_of(
    hosts: RankedBackend,
    env: int,
    task: Task,
    config: HostTrainingConfig,
    state: EnvState,
) -> HostTraining:
    """Returns a copy of the host of env ``env``, which another rank has, on the device of ``task``."""
    (training,) = make_trainings([task], [config], [env])
    load_host_state(training, _of(hosts, env, RankGroup.host_state), hosts.local.catalog.registry)
    sites = [training.site_by_name[name] for name in hosts.local.catalog.spec.slots]
    assign_roles(training, sites, state.slots, env)
    return training


def _follow(
    hosts: RankedBackend,
    where: Bools,
    state: EnvState,
    *methods: Callable[..., Any],
) -> None:
    """Calls ``methods`` of the other ranks that have hosts of ``where`` bool [E], with their rows of it and of
    ``state``."""

    def arguments(rows: slice) -> tuple[Any, ...]:
        table = table_of(state, rows)
        hosts._sent[rows.start] = table  # what comes back is compared with it
        return table, methods, where[rows]

    hosts._start(RankGroup.follow, arguments, where)


def _of(
    hosts: RankedBackend,
    env: int,
    method: Callable[..., Any],
) -> Any:
    """Returns the result of ``method`` of the rank that has the host of env ``env``, called with the host's row."""
    of_env = np.arange(hosts.count) == env
    hosts._start(method, lambda rows: (env - rows.start,), of_env)
    (result,) = hosts.ranks.finish().values()
    return result


def _joined(results: list[tuple[slice, Any]]) -> list[Any]:
    """Joins lists of what each host gave."""
    return list(chain(*(part for _, part in results)))
