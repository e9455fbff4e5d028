"""The training phase timed on the devices that train, which work on after the phase has queued everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter

import torch

from esper.telemetry.span import Spans
from esper.telemetry.timer import CUDATimer


class TrainingTime:
    """Books what GPUs train for under "train", though the CPU waits for it under "validate".

    The GPU begins with the block :meth:`queueing` and works ``seconds``, so beyond the time to queue it works
    ``seconds`` less that time, and the CPU waits for it in "validate". Of several GPUs the slowest counts. On the CPU,
    where work is done when the call returns, nothing is measured and nothing is moved.
    """

    def __init__(self, spans: Spans, devices: Iterable[torch.device]) -> None:
        self._spans = spans
        self._timers = [CUDATimer(device) for device in devices if device.type == "cuda"]
        self._queued = 0.0
        """Seconds that it took to queue the last epoch."""
        self._validated = 0.0
        """Seconds of "validate" before it."""

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Brackets the queueing of an epoch, within the phase "train".

        Each GPU's stream that is current here takes a timestamp before those of hosts fork from it and after they join.
        """
        if not self._timers:
            yield
            return
        self._validated = self._spans.seconds.get("validate", 0.0)
        began = perf_counter()
        with ExitStack() as timed:
            for timer in self._timers:
                timed.enter_context(timer)
            yield
        self._queued = perf_counter() - began

    def move_gpu_seconds(self) -> None:
        """Moves the seconds that GPUs trained on after the block, at most those of "validate" since the block began.

        It reads the timestamps, which waits for nothing once the results of validation have been transferred.
        """
        if not self._timers:
            return
        # For what the GPUs worked beyond the block the CPU waited in "validate", at most as long as that phase took.
        slowest = max(timer.seconds for timer in self._timers)
        after = slowest - self._queued
        validated = self._spans.seconds.get("validate", 0.0) - self._validated
        self._spans.move("validate", "train", max(0.0, min(after, validated)))
