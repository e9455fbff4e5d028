"""The training phase timed on the devices that train, which work on after the phase has queued everything."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from types import TracebackType

import torch

from esper.telemetry.span import Spans
from esper.telemetry.timer import CUDATimer


class TrainingTime:
    """Books what GPUs train for under "train", though the CPU waits for it under "validate".

    ``with training_time: ...`` brackets the queueing of an epoch within the phase "train": each GPU's stream that is
    current here takes a timestamp before lanes fork from it and after they have joined it. Once validation has waited
    for its transfer, :meth:`settle` reads the timestamps, which waits for nothing more. The GPU began with the block
    and worked ``seconds``, so beyond the time to queue it worked ``seconds`` less that time, and the CPU waited for it
    in "validate". Of several GPUs the slowest counts.

    On the CPU, where work is done when the call returns, nothing is measured and nothing is moved.

    Args:
        spans: the phases; the time of one is added to the other.
        devices: where hosts train.
    """

    def __init__(self, spans: Spans, devices: Iterable[torch.device]) -> None:
        self._spans = spans
        self._timers = [CUDATimer(device) for device in devices if device.type == "cuda"]
        self._began = self._queued = self._validated = 0.0

    def __enter__(self) -> None:
        if self._timers:
            self._validated = self._spans.seconds.get("validate", 0.0)
            self._began = perf_counter()
            for timer in self._timers:
                timer.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timers:
            for timer in self._timers:
                timer.__exit__(kind, error, trace)
            self._queued = perf_counter() - self._began

    def settle(self) -> None:
        """Move the seconds that GPUs trained on after the block, at most what "validate" took since it began; to be
        called after the transfer of what was validated."""
        if self._timers:
            after = max(timer.seconds for timer in self._timers) - self._queued
            validated = self._spans.seconds.get("validate", 0.0) - self._validated
            self._spans.move("validate", "train", max(0.0, min(after, validated)))
