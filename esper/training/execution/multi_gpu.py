"""Lanes on several devices: the hosts of a run take them in turn, and all devices work at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

import torch

from esper.training.execution.streams import StreamLanes
from esper.training.execution.workers import Cancelled, HasPlace, LaneError, WorkerLanes

Env = TypeVar("Env", bound=HasPlace)
OneDevice = WorkerLanes | StreamLanes


def devices_of(names: str) -> tuple[torch.device, ...]:
    """Those of ``run.device``, with commas between them."""
    return tuple(torch.device(name.strip()) for name in names.split(","))


def device_index(index: int, devices: int) -> int:
    """Which of so many devices the env with this index is on: one after the other, and again from the first."""
    return index % devices


class MultiGpuLanes:
    """The lanes of each device, two or more, each driven by a thread of its own. See Lanes for what it does.

    Nothing is shared between devices but what is on the CPU, so an env's numbers are those it would have with its
    device alone.
    """

    def __init__(self, devices: Sequence[OneDevice]) -> None:
        self.devices = tuple(devices)
        # Work of a device is always on the same thread: cuBLAS has a handle for each thread and device, with memory of
        # its own for each stream.
        self._threads = {
            id(lanes): ThreadPoolExecutor(1, thread_name_prefix=f"device {place}")
            for place, lanes in enumerate(self.devices)
        }
        self._closed = False

    def run(self, work: Callable[[Env], None], envs: Iterable[Env]) -> None:
        """Do ``work`` for every env on its device. Raises LaneError for the first env that failed on any of them."""
        self.everywhere(envs, lambda lanes, mine: lanes.run(work, mine))

    def everywhere(self, envs: Iterable[Env], do: Callable[[OneDevice, list[Env]], None]) -> None:
        """Call ``do`` with each device's lanes and its envs, side by side, and raise the first error when all are done.
        Ctrl-C cancels, and is raised when what was begun is finished."""
        futures = [self._threads[id(lanes)].submit(do, lanes, mine) for lanes, mine in self.by_device(envs)]
        try:
            wait(futures)
        except BaseException:
            self.cancel()
            wait(futures)
            raise
        _raise_first(futures)

    def by_device(self, envs: Iterable[Env]) -> list[tuple[OneDevice, list[Env]]]:
        """Each device's lanes with its envs, where it has any."""
        shares: list[list[Env]] = [[] for _ in self.devices]
        for env in envs:
            shares[device_index(env.index, len(self.devices))].append(env)
        return [(lanes, mine) for lanes, mine in zip(self.devices, shares, strict=True) if mine]

    def reasons(self) -> dict[str, int]:
        """Why work was not captured, over all devices."""
        total: dict[str, int] = {}
        for lanes in self.devices:
            for reason, times in lanes.reasons().items():
                total[reason] = total.get(reason, 0) + times
        return total

    def cancel(self) -> None:
        """Begin no more work of the run that is on, on any device; from any thread."""
        for lanes in self.devices:
            lanes.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether the run that is on was cancelled."""
        return any(lanes.cancelled for lanes in self.devices)

    def close(self) -> None:
        """Close the lanes of each device on its thread, which waits for the device, and end the threads; a second call
        does nothing. Raises the first error when all threads have ended."""
        if self._closed:
            return
        self._closed = True
        futures = [self._threads[id(lanes)].submit(lanes.close) for lanes in self.devices]
        try:
            wait(futures)
        finally:
            for thread in self._threads.values():
                thread.shutdown()
        _raise_first(futures)

    def __enter__(self) -> MultiGpuLanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


AnyLanes = WorkerLanes | StreamLanes | MultiGpuLanes


def by_device(lanes: AnyLanes, envs: Iterable[Env]) -> list[tuple[OneDevice, list[Env]]]:
    """The lanes of each device with those of ``envs`` that are on it."""
    return lanes.by_device(envs) if isinstance(lanes, MultiGpuLanes) else [(lanes, list(envs))]


def everywhere(lanes: AnyLanes, envs: Sequence[Env], do: Callable[[OneDevice, list[Env]], None]) -> None:
    """``do`` with the lanes of each device and its envs; of several devices side by side."""
    if isinstance(lanes, MultiGpuLanes):
        lanes.everywhere(envs, do)
    else:
        do(lanes, list(envs))


def _raise_first(futures: Sequence[Future[None]]) -> None:
    """Errors of lanes as one: that of the first env, with those of other devices as notes. Errors that are not about a
    lane come before them, with all others as notes."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    failed = sorted((error for error in errors if isinstance(error, LaneError)), key=lambda error: error.env)
    foreign = [error for error in errors if not isinstance(error, LaneError | Cancelled)]
    if foreign:
        for other in (*foreign[1:], *failed):
            foreign[0].add_note(f"It was not the only one: {type(other).__name__}: {other}")
        raise foreign[0]
    if failed:
        first, *others = failed
        for other in others:
            first.causes += other.causes
            first.add_note(f"It was not the only one: {other}")
        raise first
    if errors:
        raise errors[0]
