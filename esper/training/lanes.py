"""Lanes: where envs run. On the CPU a lane is a persistent worker thread with one intra-op thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from esper import _host


class HasPlace(Protocol):
    """What runs on a lane says where it is, so that an error can be found."""

    @property
    def index(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def batch(self) -> int: ...


Env = TypeVar("Env", bound=HasPlace)


class LaneError(RuntimeError):
    """An error inside a lane, with the env, epoch and batch it happened in; the cause is chained."""

    def __init__(self, env: HasPlace, cause: Exception) -> None:
        super().__init__(f"env {env.index}, epoch {env.epoch}, batch {env.batch}: {type(cause).__name__}: {cause}")
        self.env, self.epoch, self.batch = env.index, env.epoch, env.batch
        self.causes: tuple[Exception, ...] = (cause,)
        """The errors of all envs that failed, this one's first."""


class DeviceFailed(RuntimeError):
    """A device failed outside the work of any one env; the cause is chained.

    CUDA reports an error of a kernel with a later call, often one that is about another env or about none.
    """


class Cancelled(RuntimeError):
    """Work was cancelled. Raised by work that sees ``Lanes.cancelled`` and stops, and then by ``Lanes.run``."""


class Lanes:
    """A pool of lanes, one for each physical core unless ``count`` says how many.

    An env is worked on by one lane at a time and owns all it writes, so there are no locks, and the results are the
    same bits for any number of lanes: every lane computes with exactly one intra-op thread. The env that took longest
    the last time is begun first, so that it is not left over at the end.
    """

    def __init__(self, count: int | None = None) -> None:
        cores = _host.physical_cores()
        self.count = count or cores
        # Fewer lanes than cores stay where the system puts them: two processes with one lane each would share a core.
        self._pool = _host.WorkerPool(self.count, _one_intra_op_thread, pin=self.count == cores, name="lane")
        self._seconds: dict[int, float] = {}  # of the last work, by env.index

    def run(self, work: Callable[[Env], None], envs: Iterable[Env]) -> None:
        """Do ``work`` for every env. One that fails does not stop the others; its error is raised after they finish.

        Raises LaneError for the first env that failed, with a note on each other one; Cancelled if work was left out
        or cut short by :meth:`cancel`. Ctrl-C cancels, and is raised when the work that was begun is finished.
        """
        envs = tuple(envs)
        tasks = [partial(work, env) for env in envs]
        outcomes = self._pool.run(tasks, [self._seconds.get(env.index, inf) for env in envs])
        errors: list[tuple[Env, Exception]] = []
        cancelled: list[int] = []
        for env, (error, seconds) in zip(envs, outcomes, strict=True):
            if isinstance(error, Cancelled | _host.Cancelled):
                cancelled.append(env.index)
            elif isinstance(error, Exception):
                errors.append((env, error))
            elif error is not None:  # SystemExit and the like are not about the env
                raise error
            else:
                self._seconds[env.index] = seconds
        if errors:
            raise first_of(errors)
        if cancelled:
            raise Cancelled(f"cancelled before the work was done for env {', '.join(map(str, cancelled))}")

    def reasons(self) -> dict[str, int]:
        """Why work is not captured, as GpuLanes tells: there is nothing on a CPU that could be."""
        return {}

    def cancel(self) -> None:
        """Begin no more work of the run that is on, and tell work that runs; from any thread. The next run is free."""
        self._pool.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether the run that is on was cancelled. Long work looks here between batches, and raises Cancelled."""
        return self._pool.cancelled

    def close(self) -> None:
        """Cancel, wait for work that runs and end the threads; a second call does nothing."""
        self._pool.close()

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _one_intra_op_thread(_worker: int) -> None:
    torch.set_num_threads(1)  # of the calling thread


def first_of(errors: Sequence[tuple[HasPlace, Exception]]) -> LaneError:
    """The error of the first env, with a note on each other one."""
    (env, cause), *others = errors
    failed = LaneError(env, cause)
    failed.__cause__ = cause
    failed.causes = tuple(error for _, error in errors)
    for other, error in others:
        failed.add_note(f"It was not the only one: {LaneError(other, error)}")
    return failed
