"""Lanes, on which envs run. On the CPU a lane is a persistent worker thread with one intra-op thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from esper import _runtime


class HasPlace(Protocol):
    """An object that runs on a lane; error messages contain its position."""

    @property
    def index(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def batch(self) -> int: ...


Env = TypeVar("Env", bound=HasPlace)


class LaneError(RuntimeError):
    """Raised for an error inside a lane, with its env, epoch and batch; the cause is chained."""

    def __init__(self, env: HasPlace, cause: Exception) -> None:
        super().__init__(f"env {env.index}, epoch {env.epoch}, batch {env.batch}: {type(cause).__name__}: {cause}")
        self.env, self.epoch, self.batch = env.index, env.epoch, env.batch
        self.causes: tuple[Exception, ...] = (cause,)
        """The errors of all envs that failed, starting with this one."""


class DeviceFailed(RuntimeError):
    """A device failed outside the work of any one env; the cause is chained.

    CUDA reports an error of a kernel with a later call, often one that is about another env or about none.
    """


class Cancelled(RuntimeError):
    """Raised by work that stops because of ``Lanes.cancelled``, and then by ``Lanes.run``."""


class WorkerLanes:
    """A pool of ``count`` lanes; None: one per physical core.

    One lane at a time works on an env, which owns everything it writes, so there are no locks. Every lane computes with
    exactly one intra-op thread, so results are bit-identical for any number of lanes. The env that took longest the
    last time starts first, which shortens the wait at the end.
    """

    def __init__(self, count: int | None = None) -> None:
        cores = _runtime.physical_cores()
        self.count = count or cores
        # Fewer lanes than cores are not pinned: otherwise two processes with one lane each would share a core.
        self._pool = _runtime.WorkerPool(self.count, _one_intra_op_thread, pin=self.count == cores, name="lane")
        self._seconds: dict[int, float] = {}  # of the last work, by env.index

    def run(self, work: Callable[[Env], None], envs: Iterable[Env]) -> None:
        """Runs ``work`` for every env. A failure does not stop the others; it is raised after they finish.

        Raises LaneError for the first env that failed, with a note on each other one; Cancelled if :meth:`cancel`
        skipped or interrupted work. Ctrl-C cancels, and is raised once started work has finished.
        """
        envs = tuple(envs)
        tasks = [partial(work, env) for env in envs]
        outcomes = self._pool.run(tasks, [self._seconds.get(env.index, inf) for env in envs])
        errors: list[tuple[Env, Exception]] = []
        cancelled: list[int] = []
        for env, (error, seconds) in zip(envs, outcomes, strict=True):
            if isinstance(error, Cancelled | _runtime.Cancelled):
                cancelled.append(env.index)
            elif isinstance(error, Exception):
                errors.append((env, error))
            elif error is not None:  # SystemExit and the like do not concern the env
                raise error
            else:
                self._seconds[env.index] = seconds
        if errors:
            raise first_of(errors)
        if cancelled:
            raise Cancelled(f"cancelled before the work was done for env {', '.join(map(str, cancelled))}")

    def reasons(self) -> dict[str, int]:
        """Returns reasons why work is not captured, as in StreamLanes; always empty, since a CPU captures nothing."""
        return {}

    def cancel(self) -> None:
        """Starts no more work of the current run and signals running work; callable from any thread.

        The next run is not affected.
        """
        self._pool.cancel()

    @property
    def cancelled(self) -> bool:
        """True if the current run was cancelled. Long work checks it between batches and raises Cancelled."""
        return self._pool.cancelled

    def close(self) -> None:
        """Cancels, waits for running work and ends the threads; a second call does nothing."""
        self._pool.close()

    def __enter__(self) -> WorkerLanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _one_intra_op_thread(_worker: int) -> None:
    torch.set_num_threads(1)  # of the calling thread


def first_of(errors: Sequence[tuple[HasPlace, Exception]]) -> LaneError:
    """Makes the error of the first env, with a note on each other one."""
    (env, cause), *others = errors
    failed = LaneError(env, cause)
    failed.__cause__ = cause
    failed.causes = tuple(error for _, error in errors)
    for other, error in others:
        failed.add_note(f"It was not the only one: {LaneError(other, error)}")
    return failed
