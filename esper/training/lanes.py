"""Lanes: where envs run. On the CPU a lane is a persistent worker thread with one intra-op thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from esper._host import physical_cores


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


class Lanes:
    """A pool of lanes. An env is worked on by one lane at a time and owns all it writes, so there are no locks, and the
    results are the same bits for any number of lanes: every lane computes with exactly one intra-op thread.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or physical_cores()
        self._pool = ThreadPoolExecutor(
            self.count, thread_name_prefix="lane", initializer=torch.set_num_threads, initargs=(1,)
        )

    def run(self, work: Callable[[Env], None], envs: Iterable[Env]) -> None:
        """Do ``work`` for every env. One that fails does not stop the others; its error is raised after they finish."""
        running: list[tuple[Env, Future[None]]] = [(env, self._pool.submit(work, env)) for env in envs]
        failed: LaneError | None = None
        for env, future in running:
            error = future.exception()
            if isinstance(error, Exception) and failed is None:
                failed = LaneError(env, error)
                failed.__cause__ = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
