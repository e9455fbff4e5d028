"""Hosts spread over the ranks of a run: rank 0 has the state of all envs, and trains the first of their hosts.

An epoch takes one call: the other ranks receive the state of their envs, train, validate and govern, and send that
state back. All that decides, learns, logs and saves is on rank 0 and knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import numpy as np

from esper.config import ConfigError
from esper.config.resolved import HostTrainingConfig
from esper.core.slots import Bools, Floats, Ints
from esper.core.state import EnvState, table_of, write_changes
from esper.data.task import Task
from esper.env.backend import Backend, Rollbacks
from esper.env.host_row import assign_roles
from esper.env.rank_hosts import Epoch, HostGroup, RankHosts, RankServer
from esper.env.training_backend import TrainingBackend, make_trainings
from esper.training.counterfactual import Paired
from esper.training.execution.ranks import RunRanks
from esper.training.executor import RankFailed, RankLost
from esper.training.host_state import load_host_state
from esper.training.host_training import HostTraining

Arguments = Callable[[slice], tuple[Any, ...]]
"""The arguments of a call to the rank that has the hosts of these rows."""


class OtherRanks:
    """Calls of the hosts that other ranks have; ``count`` is the number of hosts on all ranks."""

    def __init__(self, ranks: RunRanks, count: int) -> None:
        self.ranks = ranks
        self.count = count
        self.name = ranks.new_name()
        self.shares: dict[int, slice] = {}
        """Rows of the hosts of every other rank that has some."""
        for rank in range(1, ranks.size):
            share = ranks.share(count, rank)
            if share:
                self.shares[rank] = slice(share.start, share.stop)
        self.sent: dict[int, Floats] = {}
        """State of the envs that each of them was sent last, by its first row."""

    def with_state(self, active: Bools, state: EnvState) -> Arguments:
        """Returns the arguments of calls that need the state of envs."""

        def arguments(rows: slice) -> tuple[Any, ...]:
            table = table_of(state, rows)
            self.sent[rows.start] = table  # what comes back is compared with it
            return active[rows], table

        return arguments

    def apply(self, arguments: Arguments, mine: Callable[[], Any]) -> list[Any]:
        """Calls :meth:`RankServer.apply` on all ranks, does this rank's part meanwhile; returns results in order."""
        self.ranks.start({rank: (RankServer.apply, *arguments(rows)) for rank, rows in self.shares.items()})
        return [mine(), *self.ranks.finish().values()]

    def map(
        self,
        method: Callable[..., Any],
        mine: Callable[[], Any],
        *arguments: Any,
    ) -> list[Any]:
        """Calls ``method`` on the hosts of all ranks, and ``mine`` meanwhile; returns results in order."""
        self.start(method, lambda _: arguments)
        return [mine(), *(result for _, result in self.finish())]

    def start(
        self,
        method: Callable[..., Any],
        arguments: Arguments,
        active: Bools | None = None,
    ) -> None:
        """Calls ``method`` of the other ranks that have ``active`` hosts, after the end of the call before."""
        calls = {}
        for rank, rows in self.shares.items():
            if active is None or active[rows].any():
                calls[rank] = (RankServer.call_group, self.name, method, *arguments(rows))
        # Without any, too: else its caller would take the replies to the call before for its own.
        self.ranks.start(calls)

    def finish(self) -> list[tuple[slice, Any]]:
        """Returns the results of the last call with their rows, in the order of hosts; none if no rank was called."""
        return [(self.shares[rank], result) for rank, result in self.ranks.finish().items()]

    def call(self, env: int, method: Callable[..., Any]) -> Any:
        """Returns the result of ``method`` of the rank that has the host of env ``env``, called with the host's row."""
        of_env = np.arange(self.count) == env
        self.start(method, lambda rows: (env - rows.start,), of_env)
        ((_, result),) = self.finish()
        return result


class RankedBackend(Backend):
    """The hosts of all ranks, on rank 0; the others have a :class:`esper.env.rank_hosts.RankHosts` each.

    Args:
        local: the hosts of this rank, the first ones.
        indices: env indices of all hosts, in the order of the arrays.
        config: that of all hosts.
    """

    def __init__(
        self,
        ranks: RunRanks,
        local: TrainingBackend,
        config: HostTrainingConfig,
        indices: range,
    ) -> None:
        self.local = local
        self.count = len(indices)
        self.only_added = local.only_added
        self.at_once = local.at_once
        self.others = OtherRanks(ranks, self.count)
        self.mine = slice(0, len(local.hosts))
        self._after: dict[int, Epoch] = {}
        """State before and after governing, and the rollbacks, of epochs whose rollbacks are not written yet."""
        self._training = False
        """Whether the other ranks train an epoch whose results have not arrived."""

        calls = {}
        for rank, rows in self.others.shares.items():
            group = HostGroup(config, local.catalog.spec, tuple(indices[rows]), local.governed)
            calls[rank] = (RankServer.make, self.others.name, group)
        ranks.start(calls)
        ranks.finish()

    def reset(
        self,
        starting: Bools,
        run_seed: int,
        episodes: Ints,
    ) -> None:
        self.others.start(RankHosts.reset, lambda rows: (starting[rows], run_seed, episodes[rows]), starting)
        self.local.reset(starting[self.mine], run_seed, episodes[self.mine])

    def plant(
        self,
        where: Bools,
        blueprint: Ints,
        style: Ints,
    ) -> tuple[Ints, dict[int, str]]:
        in_envs = np.any(where, axis=1)
        self.others.start(RankHosts.plant, lambda rows: (where[rows], blueprint[rows], style[rows]), in_envs)
        mine = self.local.plant(where[self.mine], blueprint[self.mine], style[self.mine])

        sizes = np.zeros((len(where), 1), dtype=np.int64)
        failures: dict[int, str] = {}
        for rows, (of_rows, failed) in [(self.mine, mine), *self.others.finish()]:
            sizes[rows] = of_rows
            for row, reason in failed.items():
                failures[rows.start + row] = reason
        return sizes, failures

    def remove(self, where: Bools) -> None:
        self.others.start(RankHosts.remove, lambda rows: (where[rows],), np.any(where, axis=1))
        self.local.remove(where[self.mine])

    def train(self, active: Bools, state: EnvState) -> None:
        """Trains an epoch; the other ranks go on to validate and govern without a further call."""
        self.others.start(RankHosts.epoch, self.others.with_state(active, state), active)
        self._training = True
        if active[self.mine].any():
            self.local.train(active[self.mine], state)

    def measure(self, active: Bools, state: EnvState) -> None:
        if not self._training:
            self.others.start(RankHosts.measure_new, self.others.with_state(active, state), active)
        self._training = False
        self.local.measure(active[self.mine], state)
        for rows, (measured, governed, rollbacks) in self.others.finish():
            # The others have governed already, but here governing comes later.
            write_changes(state, rows, self.others.sent[rows.start], measured)
            self._after[rows.start] = (measured, governed, rollbacks)

    def take_first_snapshots(self, starting: Bools, state: EnvState) -> None:
        self._after.clear()
        self.others.start(RankHosts.snapshot_new, self.others.with_state(starting, state), starting)
        self.local.take_first_snapshots(starting[self.mine], state)
        self.others.finish()

    def govern(self, active: Bools, state: EnvState) -> Rollbacks:
        rollbacks = self.local.govern(active[self.mine], state)
        for rows in self.others.shares.values():
            if rows.start not in self._after:
                continue
            measured, governed, of_rank = self._after.pop(rows.start)
            write_changes(state, rows, measured, governed)
            for row, rollback in of_rank.items():
                rollbacks[rows.start + row] = rollback
        return rollbacks

    def test_accuracy(self, state: EnvState) -> Floats:
        accuracies = self.others.map(RankHosts.test, lambda: self.local.test_accuracy(state))
        return np.concatenate(accuracies)

    def shapley(self, env: int) -> dict[str, Paired]:
        if env < self.mine.stop:
            return self.local.shapley(env)
        values: dict[str, Paired] = self.others.call(env, RankHosts.shapley)
        return values

    def copy_of(
        self,
        env: int,
        task: Task,
        config: HostTrainingConfig,
        state: EnvState,
    ) -> HostTraining:
        """Returns a copy of the host of env ``env``, which another rank has, on the device of ``task``."""
        (training,) = make_trainings([task], [config], [env])
        load_host_state(training, self.others.call(env, RankHosts.host_state), self.local.catalog.registry)
        sites = [training.site_by_name[name] for name in self.local.catalog.spec.slots]
        assign_roles(training, sites, state.slots, env)
        return training

    def map_hosts(self, function: Callable[[Any], list[Any]]) -> list[Any]:
        replies = self.others.map(RankHosts.map_hosts, lambda: function(self.local), function)
        return list(chain(*replies))

    def state_dict(self) -> Any:
        states = self.others.map(RankHosts.state_dict, self.local.state_dict)
        return list(chain(*states))

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        """Resumes. Raises KeyError or ValueError if ``saved`` belongs to different hosts."""
        if len(saved) != self.count:
            raise ValueError(f"it has {len(saved)} hosts, not {self.count}")
        self.others.start(RankHosts.resume, lambda rows: (saved[rows], table_of(state, rows)))
        self.local.load_state_dict(saved[self.mine], state)
        try:
            self.others.finish()
        except RankFailed as error:
            raise ValueError(str(error)) from error

    def close(self) -> None:
        with spread(self):
            self.local.close()


@contextmanager
def spread(hosts: RankedBackend) -> Iterator[RankedBackend]:
    """At the end of the block the other ranks free their hosts."""
    try:
        yield hosts
    finally:
        with suppress(RankFailed, RankLost, ConfigError):  # these were raised before, or do not matter any more
            ranks = hosts.others.ranks
            ranks.start(dict.fromkeys(hosts.others.shares, (RankServer.close, hosts.others.name)))
            ranks.finish()
