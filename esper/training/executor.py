"""Executors, which train the hosts of a run at the same time, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from esper.training.host_training import HostTraining


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

    def train(self, hosts: Sequence[HostTraining]) -> None:
        """Trains every host for one epoch on data in memory. Raises the errors of :meth:`run`."""

    def adopt(self, hosts: Iterable[HostTraining]) -> None:
        """Captures what ``hosts`` repeat, until :meth:`release`; does nothing if nothing can be captured."""
        return

    def release(self, hosts: Iterable[HostTraining]) -> None:
        """Drops what was captured for ``hosts`` and all references to them."""
        return

    def reasons(self) -> dict[str, int]:
        """The reasons why work was not captured, each with the number of pieces of work."""
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


class DeviceFailed(RuntimeError):
    """A device failed outside the work of any host; the cause is chained.

    CUDA reports the error of a kernel with a later call, often one for another host or for none.
    """


class Cancelled(RuntimeError):
    """Raised by work that stops because of ``Executor.cancelled``, and then by ``Executor.run``."""


def merged(errors: Sequence[HostError]) -> HostError:
    """Returns the first error, with the causes of the others and a note for each of them."""
    first, *others = errors
    for other in others:
        first.causes += other.causes
        first.add_note(f"It was not the only one: {other}")
    return first
