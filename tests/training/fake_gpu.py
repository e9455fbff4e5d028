"""A fake GPU: captured work is kept, and done when it is launched, as if without Python.

Work is done at once, but the order that streams promise is kept in ``FakeGpu.order``: with ``FakeGpu.watched``, memory
that two streams use in no order is an error, though the numbers are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import cast

from esper._runtime import StopFlag
from esper.training.execution.gpu import Gpu
from esper.training.execution.graph_cache import buffers_of
from esper.training.execution.streams import StreamExecutor
from esper.training.host_training import HostTraining
from tests.training.stream_order import Accesses, StreamOrder


@dataclass(frozen=True)
class FakeStream:
    number: int


@dataclass
class FakeCaptured:
    """See Captured."""

    gpu: FakeGpu
    work: Callable[[], object]
    stream: FakeStream
    pool: object
    keeps: tuple[object, ...]
    times: int = 0

    dead: bool = False
    """Whether torch took from it the memory of cuBLAS, as the end of another graph of its stream does."""

    def replay(self) -> None:
        assert not self.dead, "a capture on its stream failed and was given back"
        assert self.gpu.current == self.stream, "captured work belongs to its stream"
        assert self.pool in self.gpu.pools, "its memory was given back"
        self.times += 1
        with self.gpu.device_only():
            self.work()


@dataclass
class FakeResult:
    """See LaunchResult."""

    launched: list[int]
    failures: list[tuple[int, int, int, str]] = field(default_factory=list)
    stopped: bool = False
    seconds: float = 0.0


class FakeGpu:
    """A stand-in with the methods of Gpu, and faults that tests switch on."""

    def __init__(self) -> None:
        self.hosts: list[HostTraining] = []
        self.captured: list[FakeCaptured] = []
        self.pools: list[object] = []
        self.calls: list[str] = []
        self.current: FakeStream | None = None
        self.streams = 0
        self.idle: list[FakeStream] = []
        """Streams that closed executors left."""
        self.waiting = False
        """Whether all work waits for results."""
        self.refusal: BaseException | None = None
        """Error that a capture raises."""
        self.broken: RuntimeError | None = None
        """Error that every call raises that asks the device."""
        self.failed: list[FakeStream] = []
        """Streams of captures that failed and were not given back."""
        self.fail_at: tuple[int, int] | None = None
        """(stream, step) of the next launch that fails."""
        self.before_launch: Callable[[int, int], object] = lambda _stream, _step: None
        self.order = StreamOrder()

    def watched(self) -> AbstractContextManager[Accesses]:
        """Asserts that streams use the memory of tensors that exist now in the order that was promised."""
        return Accesses(self.order, lambda: self.current).ordered()

    def stream(self) -> FakeStream:
        self.streams += 1
        return FakeStream(self.streams)

    def reuse(self, streams: Iterable[FakeStream]) -> None:
        self.idle += streams

    def pool(self) -> object:
        self.pools.append(object())
        return self.pools[-1]

    def fork(self, streams: Sequence[FakeStream]) -> None:
        assert self.current is None
        self.calls.append(f"fork {[stream.number for stream in streams]}")
        self._ask()
        for stream in streams:
            self.order.wait(stream, self.order.now(None))

    def join(self, streams: Sequence[FakeStream]) -> None:
        assert self.current is None
        self.calls.append(f"join {[stream.number for stream in streams]}")
        self._ask()
        for stream in streams:
            self.order.wait(None, self.order.now(stream))

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def waits(self, work: Callable[[], object]) -> bool:
        work()
        return self.waiting

    def capture(
        self,
        work: Callable[[], object],
        stream: FakeStream,
        pool: object,
        keeps: tuple[object, ...],
    ) -> FakeCaptured:
        assert self.current == stream, (
            "what warmed up and what is captured are on the same stream"
        )
        self.calls.append(f"capture {stream.number}")
        if self.refusal is not None:
            self.failed.append(stream)
            raise self.refusal
        self.captured.append(FakeCaptured(self, work, stream, pool, keeps))
        return self.captured[-1]

    def launch(
        self,
        captured: Sequence[FakeCaptured],
        streams: Sequence[FakeStream],
        steps: Sequence[int],
        stop: StopFlag,
    ) -> FakeResult:
        assert self.current is None
        self.calls.append(f"launch {list(steps)}")
        result, left = FakeResult([0] * len(captured)), list(steps)
        while any(left):
            if stop.is_set:
                result.stopped = True
                break
            for i, one in enumerate(captured):
                if not left[i]:
                    continue
                if self.fail_at == (i, result.launched[i]):
                    result.failures.append(
                        (
                            i,
                            result.launched[i],
                            719,
                            "unspecified launch failure (CUDA error 719)",
                        )
                    )
                    left[i] = 0
                    continue
                self.before_launch(i, result.launched[i])
                with self.on(streams[i]):
                    one.replay()
                result.launched[i] += 1
                left[i] -= 1
        return result

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self._ask()
        self.order.synchronize()

    def give_back(self) -> None:
        self.calls.append("give back")
        for one in self.captured:
            one.dead |= one.stream in self.failed
        self.failed.clear()
        self._ask()

    def _ask(self) -> None:
        if self.broken is not None:
            raise self.broken

    @contextmanager
    def device_only(self) -> Iterator[None]:
        """Makes Python's numbers wrong and keeps its counters, which a real launch does not use."""
        counted = [
            (training.gradient_stats, training.gradient_stats.batches)
            for training in self.hosts
        ]
        places = [
            (
                training,
                training.epoch,
                training.batch,
                set(training.shadows),
                buffers_of(training),
            )
            for training in self.hosts
        ]
        seeds = [
            site
            for training in self.hosts
            for site in training.sites
            if site.seed is not None
        ]
        alphas = [(seed, seed.alpha, seed.target) for seed in seeds]
        for training in self.hosts:
            training.epoch, training.batch = 10_000, 20_000
            assert training.feed is not None
            training.feed.epoch = 30_000
        for seed, alpha, _ in alphas:
            seed.alpha = 0.0123 if alpha else 0.0
            seed.target = 0.0456
        try:
            yield
        finally:
            for stats, batches in counted:
                stats.batches = batches
            for training, epoch, batch, shadows, buffers in places:
                training.epoch, training.batch = epoch, batch
                assert set(training.shadows) == shadows
                assert all(
                    one is other
                    for one, other in zip(buffers, buffers_of(training), strict=True)
                )
            for seed, alpha, target in alphas:
                seed.alpha, seed.target = alpha, target


def fake_executor(gpu: FakeGpu, capture: bool = True) -> StreamExecutor:
    return StreamExecutor(cast(Gpu, gpu), capture)
