"""CUDATimer: device time of a block of work, on CUDA, the CPU or MPS."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Self

import torch

TYPES = ("cuda", "cpu", "mps")


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
        if self.device.type not in TYPES:
            raise ValueError(f"a CUDATimer measures work on {', '.join(TYPES)}; not on {self.device}")
        self._times: list[Any] = []
        """The beginning and the end of the last block, as far as it has come."""

    def __enter__(self) -> Self:
        if len(self._times) == 1:
            raise RuntimeError("this timer is already running; use a separate timer for a nested block")
        self._times = [self._now()]
        return self

    def __exit__(self, *error: object) -> None:
        self._times.append(self._now())

    @property
    def seconds(self) -> float:
        """Seconds of the last block; on CUDA the first read waits for its end."""
        if len(self._times) < 2:
            raise RuntimeError("nothing to read: no block has ended since the timer was created or last entered")
        begin, end = self._times
        if self.device.type != "cuda":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _now(self) -> float | torch.cuda.Event:
        """Returns the time, or an event for it: a new one, because recording an event again discards its time."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            return event
        if self.device.type == "mps":
            torch.mps.synchronize()
        return perf_counter()
