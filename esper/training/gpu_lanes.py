"""Lanes on a GPU: a stream for each env, and steps that were captured once and are launched without Python.

An epoch of an env whose step has not been captured begins with a few ordinary steps, which warm up everything that a
capture must find ready; then the step is recorded, which does nothing by itself, and the rest of the epoch is launched.
So nothing has to be put back, and captured or not, the numbers are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from esper._host import StopFlag
from esper.training.capture import CaptureCache, Repeater, Signature, memory_of, obstacle, signature_of
from esper.training.env_state import ParallelEnvState
from esper.training.gpu import Captured, Gpu
from esper.training.host_step import begin_epoch, train_step
from esper.training.lanes import Cancelled, HasPlace, first_of
from esper.training.storage import ParameterGroup

WARM_UP = 3
"""Ordinary steps before a capture: libraries choose their algorithms, and the allocator has seen every size."""

Env = TypeVar("Env", bound=HasPlace)
Failures = list[tuple[HasPlace, Exception]]


class GpuLanes:
    """One lane an env, which are all worked on at once. See Lanes for what it does; here, work is queued.

    Args:
        gpu: where.
        capture: whether steps are captured; if not, each is queued by Python.
    """

    def __init__(self, gpu: Gpu, capture: bool = True) -> None:
        self.gpu = gpu
        self.capture = capture
        self.capture_seconds = 0.0
        """Spent on capturing so far."""
        self._stop = StopFlag()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._pools: dict[int, Any] = {}
        self._caches: dict[int, CaptureCache] = {}
        self._repeaters: dict[int, Repeater] = {}

    def run(self, work: Callable[[Env], None], envs: Iterable[Env]) -> None:
        """Do ``work`` for every env, each on its stream. One that fails does not stop the others; its error is raised
        after they were queued, as a LaneError."""
        envs = list(envs)
        self._forked(envs, lambda failures: [self._guarded(env, work, failures) for env in envs])

    def train(self, envs: Sequence[ParallelEnvState]) -> None:
        """One epoch of every env, from data that lies on the GPU. Raises LaneError as :meth:`run` does."""
        self._forked(envs, lambda failures: self._epoch([_Epoch(env) for env in envs], failures))

    def adopt(self, envs: Iterable[ParallelEnvState]) -> None:
        """What these envs repeat is captured, too."""
        for env in envs if self.capture else ():
            repeater = Repeater(env, partial(self._record, env))
            self._repeaters[env.index] = repeater
            env.repeat = repeater

    def reasons(self) -> dict[str, int]:
        """Why work was not captured: the reason, and how many kinds of work of how many envs had it."""
        found: dict[str, int] = {}
        for cache in (*self._caches.values(), *(repeater.cache for repeater in self._repeaters.values())):
            for reason in cache.refused.values():
                found[reason] = found.get(reason, 0) + 1
        return found

    @property
    def cancelled(self) -> bool:
        """Whether the epoch that is under way was cancelled."""
        return self._stop.is_set

    def cancel(self) -> None:
        """Launch no more steps of the epoch that is under way; from any thread."""
        self._stop.set()

    def close(self) -> None:
        """Wait for what was queued, and drop what was captured."""
        self._caches.clear()
        self._repeaters.clear()
        self.gpu.join(list(self._streams.values()))

    def __enter__(self) -> GpuLanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forked(self, envs: Sequence[HasPlace], queue: Callable[[Failures], object]) -> None:
        """Streams take up what was queued before, and are waited for by what is queued after."""
        streams = [self._stream(env.index) for env in envs]
        failures: Failures = []
        self._stop.clear()
        self.gpu.fork(streams)
        try:
            queue(failures)
        finally:
            self.gpu.join(streams)
        if failures:
            raise first_of(failures)
        if self._stop.is_set:
            raise Cancelled("cancelled before all steps of the epoch were launched")

    def _guarded(self, env: Env, work: Callable[[Env], object], failures: Failures) -> bool:
        """Whether ``work`` went well, on the env's stream."""
        try:
            with self.gpu.on(self._stream(env.index)):
                work(env)
        except Exception as error:
            failures.append((env, error))
            return False
        return True

    def _epoch(self, epochs: list[_Epoch], failures: Failures) -> None:
        epochs = [epoch for epoch in epochs if self._guarded(epoch.env, epoch.begin, failures)]
        for epoch in epochs:
            epoch.captured = self._cache(epoch.env).get(epoch.signature) if self.capture else None
        fresh = [epoch for epoch in epochs if epoch.captured is None]
        self._step_in_turns(fresh, WARM_UP if self.capture else None, failures)
        for epoch in fresh if self.capture else ():
            if not epoch.failed and epoch.left:
                self._capture(epoch)
        self._launch([epoch for epoch in epochs if epoch.captured is not None and not epoch.failed], failures)
        self._step_in_turns([epoch for epoch in epochs if epoch.captured is None], None, failures)
        for epoch in epochs:
            if not epoch.failed:
                epoch.env.epoch += 1

    def _step_in_turns(self, epochs: list[_Epoch], most: int | None, failures: Failures) -> None:
        """At most so many steps of each, one env after the other, so that the GPU has work of all of them."""
        done = 0
        while epochs and done != most and not self._stop.is_set:
            epochs = [epoch for epoch in epochs if epoch.left and not epoch.failed]
            for epoch in epochs:
                epoch.failed = not self._guarded(epoch.env, epoch.step, failures)
            done += 1

    def _capture(self, epoch: _Epoch) -> None:
        """Record the epoch's step, or why that cannot be done."""
        env, cache = epoch.env, self._cache(epoch.env)
        reason = cache.refused.get(epoch.signature) or obstacle(env)
        if reason is None:
            before = env.collector.batches
            try:
                epoch.captured = self._record(env, epoch.work)
                cache.put(epoch.signature, epoch.captured)
            except Exception as error:  # a network may do anything in its forward pass
                reason = f"{type(error).__name__}: {error}"
            env.collector.batches = before  # the step was recorded, and not done
        if reason is not None:
            cache.refused[epoch.signature] = reason

    def _record(self, env: ParallelEnvState, work: Callable[[], None]) -> Captured:
        start = time.perf_counter()
        pool = self._pools.setdefault(env.index, self.gpu.pool())
        try:
            return self.gpu.capture(work, self._stream(env.index), pool, memory_of(env))
        finally:
            self.capture_seconds += time.perf_counter() - start

    def _launch(self, epochs: list[_Epoch], failures: Failures) -> None:
        captured = [epoch.captured for epoch in epochs if epoch.captured is not None]
        if not captured:
            return
        streams = [self._stream(epoch.env.index) for epoch in epochs]
        result = self.gpu.launch(captured, streams, [epoch.left for epoch in epochs], self._stop)
        for epoch, launched in zip(epochs, result.launched, strict=True):
            epoch.advance(launched)
        for lane, _step, code, text in result.failures:
            epochs[lane].failed = True
            failures.append((epochs[lane].env, RuntimeError(f"CUDA error {code}: {text}")))

    def _stream(self, index: int) -> torch.cuda.Stream:
        if index not in self._streams:
            self._streams[index] = self.gpu.stream()
        return self._streams[index]

    def _cache(self, env: ParallelEnvState) -> CaptureCache:
        return self._caches.setdefault(env.index, CaptureCache())


class _Epoch:
    """An env on its way through an epoch."""

    groups: list[ParameterGroup]
    signature: Signature

    def __init__(self, env: ParallelEnvState) -> None:
        assert env.feed is not None
        self.env, self.feed = env, env.feed
        self.left = env.feed.batches
        """Steps to do."""
        self.captured: Captured | None = None
        self.failed = False

    def begin(self, env: ParallelEnvState) -> None:
        self.groups = begin_epoch(env)
        self.feed.begin(env.epoch, env.order)
        self.signature = signature_of(env)
        env.batch = 0

    def work(self) -> None:
        """What a step puts on the stream."""
        x, y = self.feed.batch(self.env.batch)
        train_step(self.env, self.groups, x, y)

    def step(self, _env: ParallelEnvState) -> None:
        """One ordinary step."""
        self.env.batch = self.feed.batches - self.left
        self.work()
        self.left -= 1

    def advance(self, launched: int) -> None:
        """So many steps were launched, of which Python has seen nothing."""
        self.left -= launched
        self.env.batch = self.feed.batches - self.left - 1
        self.env.collector.batches += launched
