"""Lanes on a GPU: one stream per env, and work that is captured once as a CUDA graph and replayed without Python.

The first epoch of a training step begins with a few ordinary steps, which warm up everything that a capture needs. Then
the step is captured, which executes nothing, and the rest of the epoch is launched as a graph. So nothing has to be
undone, and the numbers are the same with and without capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from esper._runtime import StopFlag
from esper.training.execution.gpu import Captured, Gpu
from esper.training.execution.graph_cache import (
    REPLACES,
    WAITS,
    CaptureCache,
    Signature,
    buffers_of,
    capture_obstacle,
    memory_of,
    same_tensors,
    signature_of,
    step_signature,
)
from esper.training.execution.lanes import Cancelled, DeviceFailed, Env, HasPlace, Lanes, first_of
from esper.training.host_training import HostTraining, do
from esper.training.micro_batching import ran_out
from esper.training.step import begin_epoch, train_step

WARM_UP = 3
"""Ordinary steps before a capture, so that libraries choose their algorithms and the allocator has seen every size."""


class StreamLanes(Lanes):
    """One lane per env. Work is queued on the GPU, which executes that of all envs at the same time.

    Args:
        gpu: the device.
        captures: whether repeated work is captured; if not, Python queues all of it.
    """

    def __init__(self, gpu: Gpu, captures: bool = True) -> None:
        self.gpu = gpu
        self.captures = captures
        self._stop = StopFlag()
        self._cut_short = False
        self._failures: list[tuple[HasPlace, Exception]] = []  # of the current work
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._pools: dict[int, Any] = {}
        self._caches: dict[int, CaptureCache] = {}
        self._adopted: dict[int, HostTraining] = {}
        self._reasons: Counter[str] = Counter()  # of released caches

    def run(self, work: Callable[[Env], None], envs: Iterable[Env]) -> None:
        envs = list(envs)

        def queue() -> None:
            for env in envs:
                if self._stop.is_set:
                    self._cut_short = True
                else:
                    self._guarded(env, work)

        self._forked(envs, queue)

    def train(self, hosts: Sequence[HostTraining]) -> None:
        self._forked(hosts, lambda: self._epoch([_Epoch(training) for training in hosts]))

    def adopt(self, hosts: Iterable[HostTraining]) -> None:
        for training in hosts if self.captures else ():
            self._adopted[training.index] = training
            training.repeat = partial(self._repeat, training)

    def release(self, hosts: Iterable[HostTraining]) -> None:
        """Drops what was captured for ``hosts``, even if that fails for one of them, as on a broken GPU."""
        with ExitStack() as released:
            for training in hosts:
                if self._adopted.pop(training.index, None) is not None:
                    training.repeat = do
                cache = self._caches.pop(training.index, None)
                if cache is not None:
                    self._reasons += cache.reasons
                    released.callback(cache.clear)

    def reasons(self) -> dict[str, int]:
        return dict(sum((cache.reasons for cache in self._caches.values()), self._reasons))

    @property
    def cancelled(self) -> bool:
        return self._stop.is_set

    def cancel(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Waits for queued work and drops what was captured, even on a broken GPU; a second call does nothing."""
        with ExitStack() as closed:
            for cache in self._caches.values():
                closed.callback(cache.clear)
            closed.callback(self.release, list(self._adopted.values()))
            if self._streams:
                self.gpu.synchronize()
        self.gpu.reuse(self._streams.values())
        self._streams.clear()

    def _forked(self, envs: Sequence[HasPlace], queue: Callable[[], object]) -> None:
        """Calls ``queue`` so that its work starts after everything queued before, and later work waits for it."""
        self._stop.clear()
        self._failures, self._cut_short = [], False
        try:
            streams = [self._stream(env.index) for env in envs]
            self.gpu.fork(streams)
        except RuntimeError as error:
            raise _device_failed("began", envs, error) from error
        try:
            queue()
        except BaseException as error:
            self._join(streams, envs, error)
            raise
        first = first_of(self._failures) if self._failures else None
        self._join(streams, envs, first)
        if first is not None:
            raise first
        if self._cut_short:
            raise Cancelled("cancelled before all of the work was queued")

    def _join(self, streams: list[torch.cuda.Stream], envs: Sequence[HasPlace], first: BaseException | None) -> None:
        """Makes later work wait for ``streams``.

        If the GPU fails here, the error ``first`` that led to it gets a note; without one, DeviceFailed is raised.
        """
        try:
            self.gpu.join(streams)
        except RuntimeError as error:
            failed = _device_failed("ended", envs, error)
            if first is None:
                raise failed from error
            first.add_note(f"After that, {failed}")

    def _guarded(self, env: Env, work: Callable[[Env], object]) -> bool:
        """Does ``work`` on the env's stream; returns False if it failed."""
        try:
            with self.gpu.on(self._stream(env.index)):
                work(env)
        except Exception as error:
            self._failures.append((env, error))
            return False
        return True

    def _epoch(self, epochs: list[_Epoch]) -> None:
        epochs = [epoch for epoch in epochs if self._guarded(epoch.training, partial(self._begin, epoch))]
        fresh = [epoch for epoch in epochs if epoch.fresh]
        self._step_in_turns(fresh, WARM_UP - 1)
        for epoch in fresh:
            if epoch.left > 1 and not epoch.failed and not self._stop.is_set:
                epoch.failed = not self._guarded(epoch.training, partial(self._last_before_capture, epoch))
        self._launch([epoch for epoch in epochs if epoch.captured is not None and not epoch.failed])
        self._step_in_turns([epoch for epoch in epochs if epoch.captured is None])
        for epoch in epochs:
            if epoch.left and not epoch.failed:
                self._cut_short = True
            elif not epoch.failed:
                epoch.training.epoch += 1

    def _begin(self, epoch: _Epoch, training: HostTraining) -> None:
        """Begins the epoch and looks up its step, which is ``captured`` if it is known, or ``fresh`` if it can be."""
        epoch.begin()
        if not self.captures:
            return
        cache, epoch.signature = self._cache(training), step_signature(training)
        epoch.captured = cache.get(epoch.signature)
        if epoch.captured is not None or cache.refuses(epoch.signature):
            return
        reason = capture_obstacle(training)
        if reason is not None:
            cache.refuse(epoch.signature, reason)
            return
        cache.make_room()
        epoch.fresh = True

    def _last_before_capture(self, epoch: _Epoch, training: HostTraining) -> None:
        batches = training.collector.batches + 1
        epoch.captured = self._do_and_capture(training, epoch.signature, lambda: epoch.step(training), epoch.work)
        training.collector.batches = batches  # the capture executed nothing

    def _repeat(self, training: HostTraining, key: Hashable, work: Callable[[], None]) -> None:
        """Does ``work`` on the host's lane: captures it the second time, since much is never repeated, and replays it
        from then on."""
        cache, signature = self._cache(training), (key, signature_of(training))
        captured = cache.get(signature)
        if captured is not None:
            captured.replay()
        elif cache.refuses(signature) or not cache.meet(signature):
            work()
        else:
            cache.make_room()
            self._do_and_capture(training, signature, work, work)

    def _do_and_capture(
        self, training: HostTraining, signature: Signature, first: Callable[[], None], work: Callable[[], None]
    ) -> Captured | None:
        """Does ``first``, which equals ``work``, to see whether it can be captured, and captures ``work``.

        Returns None, with the reason in the cache, if it cannot.
        """
        cache, before = self._cache(training), buffers_of(training)
        reason = WAITS if self.gpu.waits(first) else None
        if reason is None and not same_tensors(before, buffers_of(training)):
            reason = REPLACES
        if reason is not None:
            cache.refuse(signature, reason)
            return None
        if training.index not in self._pools:
            self._pools[training.index] = self.gpu.pool()
        pool, keeps = self._pools[training.index], (work, *memory_of(training))
        try:
            captured = self.gpu.capture(work, self._stream(training.index), pool, keeps)
        except BaseException as error:
            self._drop_after(error, cache)
            if not isinstance(error, Exception) or ran_out(error):  # smaller micro-batches may fit
                raise
            cache.refuse(signature, f"{type(error).__name__}: {error}")  # a network may do anything in its forward pass
            return None
        cache.put(signature, captured)
        return captured

    def _drop_after(self, error: BaseException, cache: CaptureCache) -> None:
        """Gives back the memory of a failed capture, which ends the env's other captured work (see Gpu.give_back)."""
        try:
            cache.drop()
        except RuntimeError as failed:
            error.add_note(f"After that, the GPU failed: {type(failed).__name__}: {failed}")
            raise error from None

    def _step_in_turns(self, epochs: list[_Epoch], limit: int | None = None) -> None:
        """Does at most ``limit`` steps of each epoch, in turns, so that the GPU has work of all envs."""
        done = 0
        while epochs and done != limit and not self._stop.is_set:
            epochs = [epoch for epoch in epochs if epoch.left and not epoch.failed]
            for epoch in epochs:
                epoch.failed = not self._guarded(epoch.training, epoch.step)
            done += 1

    def _launch(self, epochs: list[_Epoch]) -> None:
        captured = [epoch.captured for epoch in epochs if epoch.captured is not None]
        if not captured:
            return
        streams = [self._stream(epoch.training.index) for epoch in epochs]
        result = self.gpu.launch(captured, streams, [epoch.left for epoch in epochs], self._stop)
        for epoch, launched in zip(epochs, result.launched, strict=True):
            epoch.advance(launched)
        for lane, _step, _code, text in result.failures:
            epochs[lane].fail()
            self._failures.append((epochs[lane].training, RuntimeError(text)))

    def _stream(self, index: int) -> torch.cuda.Stream:
        if index not in self._streams:
            self._streams[index] = self.gpu.stream()
        return self._streams[index]

    def _cache(self, training: HostTraining) -> CaptureCache:
        if training.index not in self._caches:
            self._caches[training.index] = CaptureCache(partial(self._before_drop, training), self.gpu.give_back)
        return self._caches[training.index]

    def _before_drop(self, training: HostTraining) -> None:
        """Waits for captured work, and lets go of its memory: gradients of the last captured step, and the pool."""
        self.gpu.synchronize()
        for group in (training.host_group, *training.pool.groups.values()):
            for parameter in group.parameters:
                parameter.grad = None
        self._pools.pop(training.index, None)


def _device_failed(verb: str, envs: Sequence[HasPlace], error: RuntimeError) -> DeviceFailed:
    names = ", ".join(str(env.index) for env in envs)
    return DeviceFailed(f"the GPU failed as work {verb} for env {names}: {type(error).__name__}: {error}")


class _Epoch:
    """The progress of a host through an epoch."""

    signature: Signature

    def __init__(self, training: HostTraining) -> None:
        assert training.feed is not None
        self.training, self.feed = training, training.feed
        self.left = training.feed.batches
        """Steps that are not done."""
        self.captured: Captured | None = None
        self.fresh = False
        """Whether the step is to be captured in this epoch."""
        self.failed = False

    def begin(self) -> None:
        training, groups = self.training, begin_epoch(self.training)
        self.feed.begin(training.epoch, training.order)
        training.batch = 0

        def work() -> None:
            train_step(training, groups, *self.feed.batch(training.batch))

        self.work = work
        """Queues one step."""

    def step(self, _training: HostTraining) -> None:
        """Does one ordinary step."""
        self.training.batch = self.feed.batches - self.left
        self.work()
        self.left -= 1

    def advance(self, launched: int) -> None:
        """Counts steps that were launched without Python."""
        self.left -= launched
        self.training.batch = max(self.feed.batches - self.left - 1, 0)
        self.training.collector.batches += launched

    def fail(self) -> None:
        """Records that the next step could not be launched."""
        self.failed = True
        self.training.batch = self.feed.batches - self.left
