"""A GPU as executors see it, on a torch.cuda and a CUDA runtime without a device."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from esper._runtime import CudaRuntime, StopFlag
from esper.training.execution import gpu as module
from esper.training.execution.gpu import Captured, Gpu
from tests.runtime.fake_cudart import Fake, compile_fake
from tests.training.stream_order import StreamOrder


@dataclass
class Stream:
    cuda_stream: int
    device: torch.device
    order: StreamOrder

    def wait_event(self, event: Event) -> None:
        self.order.wait(self.cuda_stream, event.earlier)


class TorchCuda:
    """The parts of torch.cuda that Gpu uses.

    The current device of a thread is the runtime's, or one that PyTorch will switch to when it is used: a device that
    has no context is never switched back to, only noted.
    """

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.noted = threading.local()
        self.graphs: list[weakref.ref[Graph]] = []
        self.calls: list[str] = []
        self.order = StreamOrder()
        self.current: Stream | None = None
        """The current stream; None is the default one."""
        self.pools = itertools.count(1)
        self.capturing: set[int] = set()
        """Threads that capture."""
        self.refused: set[str] = set()
        """Methods of graphs that raise."""

    def current_device(self) -> int:
        noted: int | None = getattr(self.noted, "device", None)
        return self.fake.current_device if noted is None else noted

    def set_device(self, number: int) -> None:
        self.noted.device = None
        if number != self.fake.current_device:
            assert self.fake.library.cudaSetDevice(number) == 0

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device.index)
        yield
        if before in self.fake.contexts:
            self.set_device(before)
        else:
            self.noted.device = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """The stream before is put back, and with it its device."""
        before, self.current, left = self.current_device(), stream, self.current
        if before != stream.device.index:
            self.set_device(stream.device.index)
        yield
        self.current = left
        if before != self.current_device():
            self.set_device(before)

    def current_stream(self, _device: torch.device) -> CurrentStream:
        return CurrentStream(self)

    def graph_pool_handle(self) -> int:
        return next(self.pools)

    def synchronize(self, device: torch.device) -> None:
        assert threading.get_ident() not in self.capturing
        self.calls.append(f"synchronize {device}")

    def empty_cache(self) -> None:
        """Asks the allocators of all devices."""
        assert not self.capturing
        self.calls.append("empty cache")


class CurrentStream:
    """The stream that is current when it is asked for."""

    def __init__(self, cuda: TorchCuda) -> None:
        self.order, self.key = cuda.order, cuda.current and cuda.current.cuda_stream

    def wait_stream(self, stream: Stream) -> None:
        self.order.wait(self.key, self.order.now(stream.cuda_stream))


class Event:
    """See torch.cuda.Event: it stands for all that its stream was given before it was recorded."""

    def record(self, stream: CurrentStream) -> None:
        self.earlier = stream.order.now(stream.key)


class Graph:
    """See torch.cuda.CUDAGraph."""

    def __init__(self, cuda: TorchCuda) -> None:
        self.cuda = cuda
        cuda.graphs.append(weakref.ref(self))

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.pool, self.stream = pool, self.cuda.current
        assert capture_error_mode == "thread_local"
        assert not gc.isenabled()
        self.cuda.capturing.add(threading.get_ident())
        self._done("capture_begin")

    def capture_end(self) -> None:
        self.cuda.capturing.discard(threading.get_ident())
        self._done("capture_end")

    def reset(self) -> None:
        self._done("reset")

    def _done(self, name: str) -> None:
        self.cuda.calls.append(name)
        if name in self.cuda.refused:
            raise RuntimeError(f"{name} failed")


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(compile_fake(tmp_path))


@pytest.fixture
def cuda(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> TorchCuda:
    cuda = TorchCuda(fake)
    for name in (
        "current_device",
        "device",
        "stream",
        "current_stream",
        "graph_pool_handle",
        "synchronize",
        "empty_cache",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", partial(Graph, cuda))
    monkeypatch.setattr(torch.cuda, "ExternalStream", partial(Stream, order=cuda.order))
    monkeypatch.setattr(module, "CudaRuntime", partial(CudaRuntime, str(fake.path)))
    monkeypatch.setattr(module, "_CUT_OFF", [])
    monkeypatch.setattr(module, "_IDLE", {})
    return cuda


def gpu(number: int = 1) -> Gpu:
    return Gpu(torch.device("cuda", number))


def capture(
    gpu: Gpu, work: Callable[[], object], stream: torch.cuda.Stream | None = None
) -> Captured:
    return gpu.capture(work, stream or gpu.stream(), (0, 1), ())


def alive(cuda: TorchCuda) -> int:
    gc.collect()
    return sum(graph() is not None for graph in cuda.graphs)


def by_zero() -> None:
    raise ZeroDivisionError("of the network")


@pytest.mark.trap(32)
def test_a_fork_comes_after_what_was_queued_and_a_join_before_what_is(
    cuda: TorchCuda,
) -> None:
    one, order = gpu(), cuda.order
    streams: list[Any] = [one.stream(), one.stream()]
    names = [stream.cuda_stream for stream in streams]
    first = order.work(None)
    assert not any(order.before(name, None, first) for name in names)
    one.fork(streams)
    assert all(order.before(name, None, first) for name in names)
    later, done = order.work(None), [order.work(name) for name in names]
    assert not any(order.before(name, None, later) for name in names)
    assert not any(
        order.before(None, name, number)
        for name, number in zip(names, done, strict=True)
    )
    one.join(streams)
    assert all(
        order.before(None, name, number)
        for name, number in zip(names, done, strict=True)
    )
    assert not any(order.before(name, None, later) for name in names), (
        "streams go on at once"
    )
    assert not order.before(names[0], names[1], done[1])


@pytest.mark.trap(36)
@pytest.mark.trap(37)
def test_work_is_captured_and_launched_on_its_stream_and_in_its_memory(
    cuda: TorchCuda, fake: Fake
) -> None:
    one, seen = gpu(), list[Stream | None]()
    streams: list[Any] = [one.stream(), one.stream()]
    pools = [one.pool(), one.pool()]
    captured = [
        one.capture(lambda: seen.append(cuda.current), stream, pool, ())
        for stream, pool in zip(streams, pools, strict=True)
    ]
    assert seen == [each.graph.stream for each in captured] == streams  # type: ignore[attr-defined]
    assert [each.graph.pool for each in captured] == pools  # type: ignore[attr-defined]
    assert pools[0] != pools[1]
    for number, each in enumerate(captured):
        each.graph.raw_cuda_graph_exec = lambda number=number: 7 + number  # type: ignore[method-assign,misc]
    one.launch(captured, streams, [2, 2], StopFlag())
    assert (
        fake.launches == [(7, streams[0].cuda_stream), (8, streams[1].cuda_stream)] * 2
    )


def test_a_capture_whose_work_fails_is_ended_and_its_memory_is_given_back(
    cuda: TorchCuda,
) -> None:
    one = gpu()
    with pytest.raises(ZeroDivisionError, match="of the network"):
        capture(one, by_zero)
    assert cuda.calls == ["synchronize cuda:1", "capture_begin", "capture_end"], (
        "others may still use its stream"
    )
    one.give_back()
    assert cuda.calls[3:] == ["reset", "empty cache"]
    assert alive(cuda) == 0
    assert gc.isenabled()


@pytest.mark.parametrize("refused", ["capture_begin", "capture_end"])
def test_a_capture_that_cuda_cuts_off_outlives_all_that_may_ask_for_it(
    cuda: TorchCuda, refused: str
) -> None:
    cuda.refused = {refused, "capture_end"}
    one = gpu()
    with pytest.raises(RuntimeError, match=f"{refused} failed"):
        capture(one, lambda: None)
    one.give_back()
    assert "reset" in cuda.calls
    del one
    assert alive(cuda) == 1


def test_two_devices_capture_one_after_the_other_and_the_allocators_are_left_alone_meanwhile(
    cuda: TorchCuda,
) -> None:
    """The stand-in's graph and cache refuse anything else."""
    meet, most = threading.Barrier(3, timeout=20), []

    def work() -> None:
        threading.Event().wait(0.05)
        most.append(len(cuda.capturing))

    def do(number: int) -> None:
        one = gpu(number)
        meet.wait()
        for _ in range(3):
            capture(one, work)

    def give_back() -> None:
        one = gpu(0)
        meet.wait()
        for _ in range(5):
            threading.Event().wait(0.02)
            one.give_back()

    with ThreadPoolExecutor(3) as threads:
        for future in [
            threads.submit(do, 0),
            threads.submit(do, 1),
            threads.submit(give_back),
        ]:
            future.result(60)
    assert most == [1] * 6
    assert gc.isenabled()


def test_work_on_one_device_makes_no_context_on_another(
    cuda: TorchCuda, fake: Fake
) -> None:
    one = gpu(1)
    stream: Any = one.stream()
    with one.on(stream):
        assert cuda.current_device() == 1
    assert cuda.current_device() == 0
    captured = capture(one, lambda: None, stream)
    captured.graph.raw_cuda_graph_exec = lambda: 7  # type: ignore[method-assign]
    assert one.launch([captured], [stream], [3], StopFlag()).launched == [3]
    one.give_back()
    assert fake.launches == [(7, stream.cuda_stream)] * 3
    assert fake.contexts == fake.launch_devices == {1}


def test_a_device_without_a_number_is_the_current_one(
    cuda: TorchCuda, fake: Fake
) -> None:
    fake.library.cudaSetDevice(1)
    assert Gpu(torch.device("cuda")).device == torch.device("cuda", 1)


def test_streams_of_closed_executors_serve_the_next_ones_on_the_device(
    cuda: TorchCuda,
) -> None:
    """Each stream once, though it was the stream of two executors."""
    first = gpu(1)
    one, two = first.stream(), first.stream()
    first.reuse([one, two, one])
    other, second = gpu(0), gpu(1)
    assert other.stream().cuda_stream not in (one.cuda_stream, two.cuda_stream)
    again = [second.stream().cuda_stream for _ in range(3)]
    assert {one.cuda_stream, two.cuda_stream} < set(again)
    assert len(set(again)) == 3
