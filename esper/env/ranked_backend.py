"""Hosts spread over the ranks of a run: rank 0 has the state of all envs, and trains the first of their hosts.

An epoch takes one exchange: the other ranks receive the state of their envs, train, validate and govern, and send that
state back. All that decides, learns, logs and saves is on rank 0 and knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import numpy as np

from esper.attribution.paired import Paired
from esper.config import ConfigError
from esper.config_resolved import HostTrainingConfig
from esper.data.task import Task
from esper.env.backend import Backend
from esper.env.env_host import assign_roles
from esper.env.rank_hosts import HostGroup, Reply
from esper.env.state import EnvState, table_of, write_changes
from esper.env.training_backend import TrainingBackend, make_trainings
from esper.lifecycle.slots import Bools, Floats, Ints
from esper.training.execution.messages import RankLost
from esper.training.execution.ranks import RankFailed, RunRanks
from esper.training.governor import Panic
from esper.training.host_state import load_host_state
from esper.training.host_training import HostTraining
from esper.training.micro_batching import MicroBatchPolicy

Arguments = Callable[[slice], tuple[Any, ...]]
"""The arguments of a call to the rank that has the hosts of these rows."""


class OtherRanks:
    """Calls of the hosts that other ranks have.

    Args:
        count: number of hosts on all ranks.
        policy: how batches are split here, which is the same everywhere.
    """

    def __init__(self, ranks: RunRanks, count: int, policy: MicroBatchPolicy) -> None:
        self.ranks, self.count, self.policy, self.name = ranks, count, policy, ranks.new_name()
        shares = {rank: ranks.share(count, rank) for rank in range(1, ranks.size)}
        self.shares = {rank: slice(share.start, share.stop) for rank, share in shares.items() if share}
        """Rows of the hosts of every other rank that has some."""
        self.sent: dict[int, Floats] = {}
        """State of the envs that each of them was sent last, by its first row."""

    def with_state(self, active: Bools, state: EnvState) -> Arguments:
        """Returns the arguments of calls that need the state of envs."""

        def arguments(rows: slice) -> tuple[Any, ...]:
            table = self.sent[rows.start] = table_of(state, rows)
            return active[rows], table

        return arguments

    def call(self, method: str, arguments: Arguments = lambda _: (), mine: Callable[[], Any] | None = None) -> Any:
        """Calls all ranks, does this rank's part meanwhile, and returns the results in the order of hosts."""
        self.start(method, arguments)
        own = [] if mine is None else [mine()]
        return [*own, *(result for _, result in self.finish())]

    def start(self, method: str, arguments: Arguments, active: Bools | None = None) -> None:
        """Calls ``method`` of the other ranks that have ``active`` hosts, after the end of the call before."""
        wanted = {rank: rows for rank, rows in self.shares.items() if active is None or active[rows].any()}
        count = self.policy.count
        # Without any, too: else its caller would take the answers to the call before for its own.
        self.ranks.start({rank: (self.name, method, count, *arguments(rows)) for rank, rows in wanted.items()})

    def finish(self) -> list[tuple[slice, Any]]:
        """Returns the results of the last call with their rows, in the order of hosts; none if no rank was called."""
        results = []
        for rank, reply in self.ranks.finish().items():
            assert isinstance(reply, Reply)
            results.append((self.shares[rank], reply.result))
            self._split(reply)
        return results

    def ask(self, env: int, method: str) -> Any:
        """Returns the result of ``method`` of the rank that has the host of env ``env``, called with the host's row."""
        self.start(method, lambda rows: (env - rows.start,), np.arange(self.count) == env)
        ((_, result),) = self.finish()
        return result

    def _split(self, reply: Reply) -> None:
        """Splits batches as the rank does, because memory ran out there."""
        for event in reply.splits:
            if self.policy.count != event.micro_batches:
                self.policy.restore(event.micro_batches)
                if self.policy.on_split is not None:
                    self.policy.on_split(event)


class RankedBackend(Backend):
    """The hosts of all ranks, on rank 0; the others have a :class:`esper.env.rank_hosts.RankHosts` each.

    Args:
        local: the hosts of this rank, the first ones.
        indices: env indices of all hosts, in the order of the arrays.
        config: that of all hosts.
    """

    def __init__(self, ranks: RunRanks, local: TrainingBackend, config: HostTrainingConfig, indices: range) -> None:
        self.local, self.count = local, len(indices)
        self.only_added, self.at_once = local.only_added, local.at_once
        self.others = OtherRanks(ranks, self.count, local.trainer.policy)
        self.mine = slice(0, len(local.each))
        self._after: dict[int, tuple[Floats, Floats, dict[int, tuple[Panic, int]]]] = {}
        """State before and after governing, and the rollbacks, of epochs whose rollbacks are not written yet."""
        self._training = False
        """Whether the other ranks train an epoch whose results have not arrived."""
        spec, governed = local.spec, local.governed
        self.others.call("make", lambda rows: (HostGroup(config, spec, tuple(indices[rows]), governed),))

    def reset(self, starting: Bools, run_seed: int, episodes: Ints) -> None:
        self.others.start("reset", lambda rows: (starting[rows], run_seed, episodes[rows]), starting)
        self.local.reset(starting[self.mine], run_seed, episodes[self.mine])

    def plant(self, where: Bools, blueprint: Ints, style: Ints) -> tuple[Ints, dict[int, str]]:
        sizes, failures = np.zeros((len(where), 1), dtype=np.int64), dict[int, str]()
        in_envs = np.asarray(where.any(axis=1))
        self.others.start("plant", lambda rows: (where[rows], blueprint[rows], style[rows]), in_envs)
        mine = self.local.plant(where[self.mine], blueprint[self.mine], style[self.mine])
        for rows, (grown, failed) in [(self.mine, mine), *self.others.finish()]:
            sizes[rows] = grown
            failures |= {rows.start + row: reason for row, reason in failed.items()}
        return sizes, failures

    def remove(self, where: Bools) -> None:
        self.others.start("remove", lambda rows: (where[rows],), np.asarray(where.any(axis=1)))
        self.local.remove(where[self.mine])

    def train(self, active: Bools, state: EnvState) -> None:
        """Trains an epoch; the other ranks go on to validate and govern without a further call."""
        self.others.start("epoch", self.others.with_state(active, state), active)
        self._training = True
        if active[self.mine].any():
            self.local.train(active[self.mine], state)

    def measure(self, active: Bools, state: EnvState) -> None:
        if not self._training:
            self.others.start("measure", self.others.with_state(active, state), active)
        self._training = False
        self.local.measure(active[self.mine], state)
        for rows, (measured, governed, rollbacks) in self.others.finish():
            write_changes(state, rows, self.others.sent[rows.start], measured)
            self._after[rows.start] = measured, governed, rollbacks

    def take_first_snapshots(self, starting: Bools, state: EnvState) -> None:
        self._after.clear()
        self.others.start("take_first_snapshots", self.others.with_state(starting, state), starting)
        self.local.take_first_snapshots(starting[self.mine], state)
        self.others.finish()

    def govern(self, active: Bools, state: EnvState) -> dict[int, tuple[Panic, int]]:
        rollbacks = self.local.govern(active[self.mine], state)
        for rows in self.others.shares.values():
            if rows.start in self._after:
                before, after, there = self._after.pop(rows.start)
                write_changes(state, rows, before, after)
                rollbacks |= {rows.start + row: rollback for row, rollback in there.items()}
        return rollbacks

    def test_accuracy(self, state: EnvState) -> Floats:
        return np.concatenate(self.others.call("test_accuracy", mine=lambda: self.local.test_accuracy(state)))

    def shapley(self, env: int) -> dict[str, Paired]:
        if env < self.mine.stop:
            return self.local.shapley(env)
        values: dict[str, Paired] = self.others.ask(env, "shapley")
        return values

    def copy_of(self, env: int, task: Task, config: HostTrainingConfig, state: EnvState) -> HostTraining:
        """Returns a copy of the host of env ``env``, which another rank has, on the device of ``task``."""
        (training,) = make_trainings([task], [config], [env])
        load_host_state(training, self.others.ask(env, "host_state"), self.local.blueprints)
        assign_roles(training, [training.site_by_name[name] for name in self.local.spec.slots], state.slots, env)
        return training

    def of_each(self, question: Callable[[Any], list[Any]]) -> list[Any]:
        return list(chain(*self.others.call("of_each", lambda _: (question,), mine=lambda: question(self.local))))

    def state_dict(self) -> Any:
        return list(chain(*self.others.call("state_dict", mine=self.local.state_dict)))

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        """Resumes. Raises KeyError or ValueError if ``saved`` belongs to different hosts."""
        if len(saved) != self.count:
            raise ValueError(f"it has {len(saved)} hosts, not {self.count}")
        self.others.start("load_state_dict", lambda rows: (saved[rows], table_of(state, rows)))
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
            hosts.others.call("close")
