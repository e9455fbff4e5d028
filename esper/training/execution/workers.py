"""The executor on a CPU: persistent worker threads with one intra-op thread each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf

import torch

from esper import _runtime
from esper.training.execution.cores import usable_cores
from esper.training.executor import Cancelled, Executor, HostError, Placed, merged
from esper.training.host_training import HostTraining
from esper.training.native import NativePasses
from esper.training.step import train_epoch


class WorkerExecutor(Executor):
    """A pool of ``count`` workers; None: one per core that may be used.

    One worker at a time has a host, which owns everything it writes, so there are no locks. Every worker computes with
    exactly one intra-op thread, so results are bit-identical for any number of workers. The host that took longest the
    last time starts first, which shortens the wait at the end.

    If it is ``native``, the passes of hosts run in compiled code where they can; with ``most_flops``, those of small
    hosts only, see :class:`NativePasses`.
    """

    captures = False

    def __init__(
        self,
        count: int | None = None,
        native: bool = False,
        most_flops: float | None = None,
    ) -> None:
        self.count = count or usable_cores()
        self.native = native
        self.most_flops = most_flops
        self._adopted: list[HostTraining] = []
        self._reasons: Counter[str] = Counter()  # of hosts that were released
        # Fewer workers than cores are not pinned: otherwise two processes with one worker each would share a core.
        pin = self.count == _runtime.physical_cores()
        self._pool = _runtime.WorkerPool(
            self.count,
            _one_intra_op_thread,
            pin=pin,
            name="worker",
        )
        self._seconds: dict[int, float] = {}  # of the last work, by host.index

    def run(self, work: Callable[[Placed], None], hosts: Iterable[Placed]) -> None:
        hosts = tuple(hosts)
        tasks = [partial(work, host) for host in hosts]
        # The slowest host starts first, and before it those that have not worked yet.
        expected = [self._seconds.get(host.index, inf) for host in hosts]
        outcomes = self._pool.run(tasks, expected)

        errors = []
        cancelled = []
        for host, (error, seconds) in zip(hosts, outcomes, strict=True):
            if isinstance(error, Cancelled | _runtime.Cancelled):
                cancelled.append(host.index)
            elif isinstance(error, Exception):
                errors.append(HostError(host, error))
            elif error is not None:  # SystemExit and the like do not concern the host
                raise error
            else:
                self._seconds[host.index] = seconds

        if errors:
            raise merged(errors)
        if cancelled:
            envs = ", ".join(map(str, cancelled))
            raise Cancelled(f"cancelled before the work was done for env {envs}")

    def train(
        self,
        hosts: Sequence[HostTraining],
        then: Callable[[HostTraining], None] | None = None,
    ) -> None:
        def work(training: HostTraining) -> None:
            train_epoch(training, cancelled=lambda: self.cancelled)
            if then is not None:
                then(training)

        self.run(work, hosts)

    def adopt(self, hosts: Iterable[HostTraining]) -> None:
        if not self.native:
            return
        for training in hosts:
            training.native = NativePasses(training, self._pool.cancelled_address, self.most_flops)
            self._adopted.append(training)

    def release(self, hosts: Iterable[HostTraining]) -> None:
        for training in hosts:
            if training in self._adopted:
                self._adopted.remove(training)
            if training.native is not None:
                self._reasons += training.native.reasons
                training.native = None

    def reasons(self) -> dict[str, int]:
        total = Counter(self._reasons)
        for training in self._adopted:
            if training.native is not None:
                total += training.native.reasons
        return dict(total)

    def cancel(self) -> None:
        self._pool.cancel()

    @property
    def cancelled(self) -> bool:
        return self._pool.cancelled

    def close(self) -> None:
        self.release(list(self._adopted))
        self._pool.close()


def _one_intra_op_thread(_worker: int) -> None:
    torch.set_num_threads(1)  # of the calling thread
