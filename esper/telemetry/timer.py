"""CUDATimer: device time of a block of work, on CUDA, the CPU or MPS."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Self

import torch


class CUDATimer:
    """Times a block: ``with timer: work()``, then ``timer.seconds``. Each block replaces the one before.

    - cuda: two events, on the streams that are current on the device when the block begins and when it ends. Only
      reading ``seconds`` waits, for the second event; read it when the result of the block is needed anyway. Work on
      other streams counts only as far as that stream waits for it.
    - cpu: the clock before and after.
    - mps: the clock before and after, read when the device is idle, so the block waits at both ends. (MPS events are
      not used: reading their time can hang in some versions of torch, and short times can be negative.)

    The time of a block that raises ends with the exception.

    Args:
        device: where the work runs: cuda, cuda:1, cpu or mps.

    Raises:
        ValueError: a device of another type.
        RuntimeError: from `seconds`, before a block has ended; or a block within a block of the same timer.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        kinds: dict[str, Callable[[], _Clock | _Events]] = {
            "cuda": lambda: _Events(self.device),
            "cpu": lambda: _Clock(wait=_nothing),
            "mps": lambda: _Clock(wait=torch.mps.synchronize),
        }
        if self.device.type not in kinds:
            raise ValueError(f"a CUDATimer measures work on {', '.join(kinds)}; not on {self.device}")
        self._make = kinds[self.device.type]
        self._running: _Clock | _Events | None = None
        self._ended: _Clock | _Events | None = None

    def __enter__(self) -> Self:
        if self._running is not None:
            raise RuntimeError("this timer is already running; use a separate timer for a nested block")
        self._ended, self._running = None, self._make()
        self._running.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._running is not None
        self._running.stop()
        self._ended, self._running = self._running, None

    @property
    def seconds(self) -> float:
        """Seconds of the last block; on CUDA the first read waits for its end."""
        if self._ended is None:
            raise RuntimeError("nothing to read: no block has ended since the timer was created or last entered")
        return self._ended.seconds()


class _Clock:
    """The CPU's clock, read when ``wait`` has returned."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def start(self) -> None:
        self.wait()
        self.began = perf_counter()

    def stop(self) -> None:
        self.wait()
        self.ended = perf_counter()

    def seconds(self) -> float:
        return self.ended - self.began


class _Events:
    """A pair of CUDA events, new for every block, because recording an event again discards its unread time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        self.began.record(torch.cuda.current_stream(self.device))

    def stop(self) -> None:
        self.ended.record(torch.cuda.current_stream(self.device))

    def seconds(self) -> float:
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended)) / 1000


def _nothing() -> None:
    """On the CPU, work is complete when the call returns."""
