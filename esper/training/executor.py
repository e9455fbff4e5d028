"""Executors, which train the hosts of a run at the same time, and the errors of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

import torch

from esper.config import HostTrainingConfig
from esper.data.shared_batches import SharedBatchError, worker_died
from esper.training.host_training import HostTraining

OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "out of memory (CUDA error 2)",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""Messages of plain RuntimeErrors: two of PyTorch's CPU allocator, the others of CUDA and its libraries if they
allocate without PyTorch, as for a graph. "(CUDA error 2)" is how Esper's own launches report it."""


@dataclass(frozen=True)
class Execution:
    """The execution of training steps, as a run reports it."""

    tier: str
    """eager, native, compiled or graph."""
    refused: str | None = None
    """The reason that it is not the tier that the config names, or that auto would take; None if it is."""


class HasPlace(Protocol):
    """An object with the position of a host, which error messages contain."""

    @property
    def index(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def batch(self) -> int: ...


Placed = TypeVar("Placed", bound=HasPlace)


class Executor(Protocol):
    """Does work for many hosts at the same time; one that fails does not stop the others."""

    captures: bool
    """True if repeated work is captured as CUDA graphs."""

    @property
    def cancelled(self) -> bool:
        """True if the current work was cancelled."""

    def run(self, work: Callable[[Placed], None], hosts: Iterable[Placed]) -> None:
        """Runs ``work`` for every host.

        Raises:
            HostError: the error of the first host that failed, after all others have finished.
            DeviceFailed: a GPU failed outside the work of any host.
            Cancelled: work was skipped or interrupted because of :meth:`cancel`. Ctrl-C also cancels and is raised once
                started work has finished.
        """

    def train(
        self,
        hosts: Sequence[HostTraining],
        then: Callable[[HostTraining], None] | None = None,
    ) -> None:
        """Trains every host for one epoch on data in memory, and calls ``then`` for each host that has been trained.

        Workers of a CPU do so without waiting for the other hosts. Raises the errors of :meth:`run`.
        """

    def adopt(self, hosts: Iterable[HostTraining]) -> None:
        """Captures what ``hosts`` repeat, or runs it in compiled code, until :meth:`release`, where it can."""
        return

    def release(self, hosts: Iterable[HostTraining]) -> None:
        """Drops what was made for ``hosts`` and all references to them."""
        return

    def reasons(self) -> dict[str, int]:
        """The reasons why work was left to PyTorch, each with the number of pieces of work."""
        return {}

    def cancel(self) -> None:
        """Starts no more of the current work; callable from any thread. Later work is not affected."""

    def close(self) -> None:
        """Waits for running work and frees the threads or streams; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class HostError(RuntimeError):
    """An error in the work of a host, with its env index, epoch and batch; the cause is chained."""

    def __init__(self, host: HasPlace, cause: Exception) -> None:
        super().__init__(f"env {host.index}, epoch {host.epoch}, batch {host.batch}: {type(cause).__name__}: {cause}")
        self.env = host.index
        self.epoch = host.epoch
        self.batch = host.batch
        self.causes: tuple[Exception, ...] = (cause,)
        """The errors of all hosts that failed, starting with this one."""
        self.__cause__ = cause


class OutOfMemory(HostError):
    """Memory ran out for a host; the message says which settings need less."""

    def __init__(self, error: HostError, config: HostTrainingConfig) -> None:
        RuntimeError.__init__(
            self,
            f"{error}\nMemory ran out. A new run needs less with more micro-batches (--set task.micro_batches="
            f"{2 * config.task.micro_batches}), a smaller task.batch_size (here {config.task.batch_size}), or fewer "
            f"hosts (env.n_envs, here {config.env.n_envs}).",
        )
        self.env = error.env
        self.epoch = error.epoch
        self.batch = error.batch
        self.causes = error.causes
        self.__cause__ = error


class DeviceFailed(RuntimeError):
    """A device failed outside the work of any host; the cause is chained.

    CUDA reports the error of a kernel with a later call, often one for another host or for none.
    """


class Cancelled(RuntimeError):
    """Raised by work that stops because of ``Executor.cancelled``, and then by ``Executor.run``."""


class RankLost(RuntimeError):
    """A rank does not answer any more."""

    def __init__(self, rank: int | None, why: str, hangs: bool) -> None:
        """Takes the number of the rank, None if it is not known."""
        super().__init__(f"{'another rank' if rank is None else f'rank {rank}'} {why}")
        self.hangs = hangs
        """Whether the rank is there but was silent for too long."""


class RankFailed(RuntimeError):
    """An error that another rank raised; the message names the rank, and has its traceback if it was a surprise."""


def merged(errors: Sequence[HostError]) -> HostError:
    """Returns the first error, with the causes of the others and a note for each of them."""
    first, *others = errors
    for other in others:
        first.causes += other.causes
        first.add_note(f"It was not the only one: {other}")
    return first


def ran_out(error: BaseException) -> bool:
    """Returns True if the error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(words in str(error) for words in OUT_OF_MEMORY)


def is_expected(error: BaseException) -> bool:
    """Whether the error's message says enough without a traceback, which whoever fixes any other error needs.

    Expected are errors of a host in training, a GPU, data, a disk, memory or another rank.
    """
    if isinstance(error, HostError | DeviceFailed | SharedBatchError | RankFailed | RankLost | OSError):
        return True
    return worker_died(error) or ran_out(error)
