"""One GPU as lanes see it: streams of our own, captured work, and the loop that launches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from esper._host import CudaRuntime, LaunchResult, StopFlag


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

    def stream(self) -> torch.cuda.Stream:
        """A new stream that waits for no other; torch's own are 32, and the 33rd is the first again."""
        handle = self._runtime.create_stream(self.number)
        return torch.cuda.ExternalStream(handle, device=self.device)  # type: ignore[no-untyped-call]

    def pool(self) -> Any:
        """Memory for captured work that is never launched at the same time."""
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

    def capture(
        self, work: Callable[[], object], stream: torch.cuda.Stream, pool: Any, keeps: tuple[object, ...]
    ) -> Captured:
        """Record what ``work`` puts on ``stream``, without doing any of it. Raises whatever ``work`` does, and
        RuntimeError for what cannot be recorded, such as a wait for a result."""
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with self.on(stream):
            # Other threads of the process may allocate and wait meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                _give_up(graph)
                raise
            graph.capture_end()
        return Captured(graph, keeps)

    def launch(
        self, captured: Sequence[Captured], streams: Sequence[torch.cuda.Stream], steps: Sequence[int], stop: StopFlag
    ) -> LaunchResult:
        """Launch each as often as ``steps`` says, in turns, without Python in between; nothing waits for the GPU."""
        handles, lanes = [one.handle for one in captured], [stream.cuda_stream for stream in streams]
        return self._runtime.launch(self.number, handles, lanes, steps, stop)


def _give_up(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that has failed, whose own error is the one to report."""
    try:
        graph.capture_end()
    except RuntimeError:
        graph.reset()
