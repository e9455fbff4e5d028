"""One GPU as lanes see it: streams of our own, captured work, and the loop that launches it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from esper._host import CudaRuntime, LaunchResult, StopFlag

WAITED = "synchronizing CUDA operation"
"""In the words of torch's warning about an operation for whose result the CPU waits."""


@dataclass
class Captured:
    """Work that the GPU can do again by itself; it belongs to the stream that it was captured on."""

    graph: torch.cuda.CUDAGraph
    keeps: tuple[object, ...]
    """What the graph reads and writes outside its own memory, so that none of it is freed while it can be launched."""

    @property
    def handle(self) -> int:
        return self.graph.raw_cuda_graph_exec()

    def replay(self) -> None:
        """Launch it once, on the current stream."""
        self.graph.replay()


class Gpu:
    """What lanes need of a CUDA device. Streams live as long as the process: torch may hold memory that belongs to one,
    and memory of streams that come and go is stranded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.number = torch.cuda.current_device() if device.index is None else device.index
        self._runtime = CudaRuntime()
        self._wrecks: list[torch.cuda.CUDAGraph] = []
        """Captures that failed. Up to 2.12 torch's allocator may still ask one of them, and with every graph that ends
        torch may take cuBLAS's workspace from the others of its stream; so these stay."""

    def stream(self) -> torch.cuda.Stream:
        """A new stream that waits for no other; torch's own are 32, and the 33rd is the first again."""
        handle = self._runtime.create_stream(self.number)
        return torch.cuda.ExternalStream(handle, device=self.device)  # type: ignore[no-untyped-call]

    def pool(self) -> Any:
        """Memory for captured work that is never launched at the same time. It serves until the last such work is
        dropped; torch wants another one then."""
        return torch.cuda.graph_pool_handle()

    def fork(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """What is put on ``streams`` from now on comes after all that the current stream has been given."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        for stream in streams:
            stream.wait_event(event)

    def join(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """What the current stream is given from now on comes after all that ``streams`` have been given."""
        current = torch.cuda.current_stream(self.device)
        for stream in streams:
            current.wait_stream(stream)

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Work goes to ``stream``, backward passes too: by default one thread of torch's does those of all streams."""
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
            yield

    def waits(self, work: Callable[[], object]) -> bool:
        """Do ``work``; whether the CPU waited for the GPU in it, as far as torch tells. Such work cannot be captured,
        and to try it is no way to find out: up to 2.12, torch does not get over a capture that was cut off."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return any(WAITED in str(warning.message) for warning in said)

    def capture(
        self, work: Callable[[], object], stream: torch.cuda.Stream, pool: Any, keeps: tuple[object, ...]
    ) -> Captured:
        """Record what ``work`` puts on ``stream``, without doing any of it. Raises whatever ``work`` does, and
        RuntimeError for what cannot be recorded, such as a wait for a result; ``pool`` may be of no use after that."""
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self.on(stream), _without_collector():
            # Other threads of the process may allocate and wait meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
                graph.capture_end()
            except BaseException:
                self._wrecks.append(graph)
                with suppress(RuntimeError):  # the first error is the one to report
                    graph.capture_end()
                raise
        return Captured(graph, keeps)

    def synchronize(self) -> None:
        """Wait for all that the device was given."""
        torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        """Memory that nothing lies in, that of pools without work too, is free for all; waits for the device."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def launch(
        self, captured: Sequence[Captured], streams: Sequence[torch.cuda.Stream], steps: Sequence[int], stop: StopFlag
    ) -> LaunchResult:
        """Launch each as often as ``steps`` says, in turns, without Python in between; nothing waits for the GPU."""
        handles, lanes = [one.handle for one in captured], [stream.cuda_stream for stream in streams]
        return self._runtime.launch(self.number, handles, lanes, steps, stop)


@contextmanager
def _without_collector() -> Iterator[None]:
    """No garbage is collected: other graphs may be in it, and their end has no place in a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
