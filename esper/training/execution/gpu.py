"""One GPU: its streams, captured work, and the loop that launches captured work."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from esper._runtime import CudaRuntime, LaunchResult, StopFlag

PROCESS_WIDE = threading.RLock()
"""Held by the thread that changes PyTorch's sync debug mode, the warning filters or the garbage collector, until they
are restored: they belong to the process, but every device has its own thread."""

WAITED = "called a synchronizing CUDA operation"
"""PyTorch's warning about an operation whose result the CPU waits for."""

_CUT_OFF: list[torch.cuda.CUDAGraph] = []
"""Captures that CUDA aborted, kept until the process ends. In PyTorch 2.11 and 2.12 ``capture_end`` raises before it
removes the function by which the allocator recognises the capture's stream. That function refers to the graph: if the
graph were freed, a later allocation would read freed memory."""

_IDLE: dict[int, list[torch.cuda.Stream]] = {}
"""Streams of closed executors for the next ones, by device number. PyTorch keeps memory and cuBLAS's workspaces per
stream, so those of an abandoned stream would be lost."""


@dataclass
class Captured:
    """Work that the GPU can repeat by itself, on the stream on which it was captured."""

    graph: torch.cuda.CUDAGraph
    keeps: tuple[object, ...]
    """Objects whose memory the graph reads and writes, so that it is not freed while the graph can be launched."""

    def replay(self) -> None:
        """Launches the work once, on the current stream."""
        self.graph.replay()


class Gpu:
    """The operations of a CUDA device that executors use.

    Streams live as long as the process; those of closed executors are reused. Every method makes the device current
    while it runs. With another device current, PyTorch and the CUDA runtime would have to switch back to that one, and
    since CUDA 12 switching to a device makes a context on it.
    """

    def __init__(self, device: torch.device) -> None:
        self.number = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.number)
        self._runtime = CudaRuntime()
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Ended captures that failed since the last call of :meth:`give_back`."""

    def stream(self) -> torch.cuda.Stream:
        """Returns a stream without another user. PyTorch's own pool has only 32 and then returns them again."""
        with suppress(KeyError, IndexError):
            return _IDLE[self.number].pop()
        with torch.cuda.device(self.device):
            handle = self._runtime.create_stream(self.number)
            return torch.cuda.ExternalStream(handle, device=self.device)  # type: ignore[no-untyped-call]

    def reuse(self, streams: Iterable[torch.cuda.Stream]) -> None:
        """Leaves ``streams`` to the next executor; their work is done, and their captured work is dropped."""
        by_handle = {stream.cuda_stream: stream for stream in streams}
        _IDLE.setdefault(self.number, []).extend(by_handle.values())

    def pool(self) -> Any:
        """Returns memory for captured work that is never launched at the same time, until the last of it is dropped."""
        return torch.cuda.graph_pool_handle()

    def fork(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Makes later work of ``streams`` wait for everything queued on the current stream so far."""
        with torch.cuda.device(self.device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            for stream in streams:
                stream.wait_event(event)

    def join(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Makes later work of the current stream wait for everything queued on ``streams`` so far."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            for stream in streams:
                current.wait_stream(stream)

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Queues work on ``stream``, also backward passes, which one thread of PyTorch queues for all otherwise."""
        with (
            torch.cuda.device(self.device),  # else the end of torch.cuda.stream switches to another device
            torch.cuda.stream(stream),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield

    def waits(self, work: Callable[[], object]) -> bool:
        """Does ``work`` and returns whether this thread waited for a GPU, as far as PyTorch reports.

        Such work cannot be captured. Probing by capturing is unsafe: up to PyTorch 2.12 an aborted capture leaves the
        allocator unusable. Warnings about other threads do not count, and are shown only if the user had turned the
        mode on.
        """
        watcher = threading.get_ident()
        waited = False
        with PROCESS_WIDE, warnings.catch_warnings():
            before = torch.cuda.get_sync_debug_mode()  # 0: neither warns nor raises
            show = warnings.showwarning

            def note(message: Warning | str, *details: Any, **options: Any) -> None:
                nonlocal waited
                about_waiting = WAITED in str(message)
                if about_waiting and threading.get_ident() == watcher:
                    waited = True
                if not about_waiting or before:
                    show(message, *details, **options)

            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
            warnings.filterwarnings("always", message=WAITED)
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return waited

    def capture(
        self,
        work: Callable[[], object],
        stream: torch.cuda.Stream,
        pool: Any,
        keeps: tuple[object, ...],
    ) -> Captured:
        """Captures what ``work`` queues on ``stream`` without executing it. The process captures one at a time.

        Raises the errors of ``work``, and RuntimeError for what cannot be captured, such as a wait for a result. The
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
        """Ends a failed capture, so that its stream can be used again."""
        try:
            graph.capture_end()
        except RuntimeError:  # CUDA aborted it, or it had ended; the first error is the one to report
            _CUT_OFF.append(graph)
        self._failed.append(graph)

    def synchronize(self) -> None:
        """Waits for everything queued on the device."""
        torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        """Frees unused memory, including that of pools without work and of failed captures.

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
        self,
        captured: Sequence[Captured],
        streams: Sequence[torch.cuda.Stream],
        steps: Sequence[int],
        stop: StopFlag,
    ) -> LaunchResult:
        """Launches each piece as often as ``steps`` says, in turns, without Python in between and without waiting."""
        graphs = [piece.graph.raw_cuda_graph_exec() for piece in captured]
        handles = [stream.cuda_stream for stream in streams]
        with torch.cuda.device(self.device):
            return self._runtime.launch(self.number, graphs, handles, steps, stop)


@contextmanager
def without_collector() -> Iterator[None]:
    """Turns automatic garbage collection off: garbage may hold CUDA graphs, which a capture must not destroy."""
    with PROCESS_WIDE:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
