"""One GPU as lanes see it: its streams, captured work, and the loop that launches captured work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from esper._runtime import CudaRuntime, LaunchResult, StopFlag
from esper.training.execution import process_wide
from esper.training.execution.process_wide import PROCESS_WIDE, without_collector

_CUT_OFF: list[torch.cuda.CUDAGraph] = []
"""Captures that CUDA cut off, kept until the process ends. In PyTorch 2.11 and 2.12 ``capture_end`` raises before it
takes back the function by which the allocator recognises the capture's stream, and that function refers to the graph:
if the graph were freed, a later allocation would read freed memory. These graphs hold no captured work."""

_IDLE: dict[int, list[torch.cuda.Stream]] = {}
"""By device number, streams of lanes that were closed, for the next lanes. PyTorch keeps memory by stream, and cuBLAS's
workspaces, too: those of a stream that is not used again would be lost."""


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
    """What lanes need of a CUDA device. Streams live as long as the process, and lanes that are closed leave theirs to
    the next lanes.

    Every method makes the device current while it runs. With another device current, PyTorch and the CUDA runtime would
    have to switch back to that one, and since CUDA 12 switching to a device makes a context on it.
    """

    def __init__(self, device: torch.device) -> None:
        self.number = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.number)
        self._runtime = CudaRuntime()
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Captures that failed since the last call of :meth:`give_back`, which have ended."""

    def stream(self) -> torch.cuda.Stream:
        """A stream that nobody else has and that waits for no other; PyTorch's own are 32, and the 33rd is the first
        again."""
        try:
            return _IDLE[self.number].pop()
        except (KeyError, IndexError):
            pass
        with torch.cuda.device(self.device):
            handle = self._runtime.create_stream(self.number)
            return torch.cuda.ExternalStream(handle, device=self.device)  # type: ignore[no-untyped-call]

    def reuse(self, streams: Iterable[torch.cuda.Stream]) -> None:
        """Leave ``streams``, on which all work is done and nothing captured is left, to the next lanes."""
        _IDLE.setdefault(self.number, []).extend({stream.cuda_stream: stream for stream in streams}.values())

    def pool(self) -> Any:
        """Memory for captured work that is never launched at the same time. It serves until the last such work is
        dropped; torch wants another one then."""
        return torch.cuda.graph_pool_handle()

    def fork(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """What is put on ``streams`` from now on comes after all that the current stream has been given."""
        with torch.cuda.device(self.device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            for stream in streams:
                stream.wait_event(event)

    def join(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """What the current stream is given from now on comes after all that ``streams`` have been given."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            for stream in streams:
                current.wait_stream(stream)

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Work goes to ``stream``, backward passes too: by default one thread of torch's does those of all streams."""
        with (
            torch.cuda.device(self.device),  # else the end of torch.cuda.stream switches to another device
            torch.cuda.stream(stream),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield

    def waits(self, work: Callable[[], object]) -> bool:
        """Do ``work`` and return whether the CPU waited for the GPU in it, as far as PyTorch reports.

        Such work cannot be captured, and a trial capture is no test: up to PyTorch 2.12 a capture that CUDA cuts off
        leaves the allocator unusable.
        """
        return process_wide.waits(work)

    def capture(
        self, work: Callable[[], object], stream: torch.cuda.Stream, pool: Any, keeps: tuple[object, ...]
    ) -> Captured:
        """Record what ``work`` puts on ``stream``, without doing any of it. One capture at a time in the process.

        Raises whatever ``work`` does, and RuntimeError for what cannot be recorded, such as a wait for a result. The
        caller then drops all that was captured on ``stream`` and calls :meth:`give_back`; ``pool`` is used up.
        """
        with without_collector():
            self.synchronize()
            with self.on(stream):
                graph = torch.cuda.CUDAGraph()
                try:
                    # Other threads of the process may allocate and wait meanwhile.
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    work()
                    graph.capture_end()
                except BaseException:
                    self._end(graph)
                    raise
        return Captured(graph, keeps)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that its stream can be used again. Its memory is given back later."""
        try:
            graph.capture_end()
        except RuntimeError:  # CUDA cut it off, or it had ended; the first error is the one to report
            _CUT_OFF.append(graph)
        self._failed.append(graph)

    def synchronize(self) -> None:
        """Wait for all that the device was given."""
        torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        """Free memory that nothing lies in, also that of pools without work and of captures that failed.

        Nothing that was captured on the stream of a failed capture may be launched afterwards: from PyTorch 2.12 on,
        ``reset`` also frees the workspaces of cuBLAS on that stream, which graphs captured there use. ``reset``
        releases the pool of a graph whose ``capture_end`` succeeded. If it raised, PyTorch 2.15 releases the pool, and
        earlier versions keep it until the process ends.
        """
        # Emptying the cache visits all devices, and the allocator of one that captures frees nothing meanwhile.
        with PROCESS_WIDE, torch.cuda.device(self.device):
            while self._failed:
                self._failed.pop().reset()
            torch.cuda.empty_cache()

    def launch(
        self, captured: Sequence[Captured], streams: Sequence[torch.cuda.Stream], steps: Sequence[int], stop: StopFlag
    ) -> LaunchResult:
        """Launch each as often as ``steps`` says, in turns, without Python in between; nothing waits for the GPU."""
        handles, lanes = [one.handle for one in captured], [stream.cuda_stream for stream in streams]
        with torch.cuda.device(self.device):
            return self._runtime.launch(self.number, handles, lanes, steps, stop)
