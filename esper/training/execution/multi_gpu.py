"""Hosts on several devices, which work at the same time; hosts are assigned to them round-robin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch

from esper.training.executor import Cancelled, Executor, HostError, Placed, merged
from esper.training.host_trainer import device_index
from esper.training.host_training import HostTraining

AUTO = "auto"
"""Name of all GPUs of this machine, or of its CPU if it has none."""


def chosen_devices(names: str) -> str:
    """Returns ``run.device`` with the names of devices in place of ``auto``."""
    if names != AUTO:
        return names
    return ",".join(f"cuda:{number}" for number in range(torch.cuda.device_count())) or "cpu"


def devices_of(names: str) -> tuple[torch.device, ...]:
    """Returns the devices of ``run.device``, a comma-separated list."""
    return tuple(torch.device(name.strip()) for name in names.split(","))


class MultiGpuExecutor(Executor):
    """The executors of two or more devices, each driven by its own thread.

    Devices share nothing but CPU memory, so the results of a host do not depend on the other devices.
    """

    def __init__(self, devices: Sequence[Executor]) -> None:
        self.devices = tuple(devices)
        # A device always has the same thread: cuBLAS has a handle per thread and device, with memory for each stream.
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"device {i}") for i in range(len(devices))]
        self.captures = all(executor.captures for executor in self.devices)
        self._closed = False

    def run(self, work: Callable[[Placed], None], hosts: Iterable[Placed]) -> None:
        self._spread(lambda executor, share: executor.run(work, share), hosts)

    def train(
        self,
        hosts: Sequence[HostTraining],
        then: Callable[[HostTraining], None] | None = None,
    ) -> None:
        self._spread(lambda executor, share: executor.train(share, then), hosts)

    def adopt(self, hosts: Iterable[HostTraining]) -> None:
        for i, share in self._shares(hosts).items():
            self.devices[i].adopt(share)

    def release(self, hosts: Iterable[HostTraining]) -> None:
        for i, share in self._shares(hosts).items():
            self.devices[i].release(share)

    def reasons(self) -> dict[str, int]:
        total = Counter[str]()
        for executor in self.devices:
            total += Counter(executor.reasons())
        return dict(total)

    def cancel(self) -> None:
        for executor in self.devices:
            executor.cancel()

    @property
    def cancelled(self) -> bool:
        return any(executor.cancelled for executor in self.devices)

    def close(self) -> None:
        """Closes the executor of each device on its thread; raises the first error once all threads have ended."""
        if self._closed:
            return
        self._closed = True
        try:
            self._side_by_side({i: executor.close for i, executor in enumerate(self.devices)})
        finally:
            for thread in self._threads:
                thread.shutdown()

    def _shares(self, hosts: Iterable[Placed]) -> dict[int, list[Placed]]:
        shares: dict[int, list[Placed]] = {}  # hosts by number of the device
        for host in hosts:
            i = device_index(host.index, len(self.devices))
            shares.setdefault(i, []).append(host)
        return shares

    def _spread(self, call: Callable[[Executor, Any], None], hosts: Iterable[Placed]) -> None:
        """Calls each device's executor with the device's share of ``hosts``."""
        self._side_by_side({i: partial(call, self.devices[i], share) for i, share in self._shares(hosts).items()})

    def _side_by_side(self, calls: dict[int, Callable[[], Any]]) -> None:
        """Makes each call on the thread of its device and raises the first error when all have ended."""
        futures = [self._threads[i].submit(call) for i, call in calls.items()]
        try:
            wait(futures)
        except BaseException:
            self.cancel()
            wait(futures)
            raise
        _raise_first(futures)


def _raise_first(futures: Sequence[Future[None]]) -> None:
    """Raises one error for all devices: one outside of hosts, else that of the lowest env, else a cancellation."""
    failed = []
    cancelled = []
    foreign = []
    for future in futures:
        error = future.exception()
        if isinstance(error, HostError):
            failed.append(error)
        elif isinstance(error, Cancelled):
            cancelled.append(error)
        elif error is not None:
            foreign.append(error)

    failed.sort(key=lambda error: error.env)
    if foreign:
        first, *others = foreign
        for other in (*others, *failed):
            first.add_note(f"It was not the only one: {type(other).__name__}: {other}")
        raise first
    if failed:
        raise merged(failed)
    if cancelled:
        raise cancelled[0]
