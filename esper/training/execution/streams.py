"""Lanes on a GPU: a stream for each env, and work that was captured once and is launched without Python.

An epoch of an env whose step has not been captured begins with a few ordinary steps, which warm up everything that a
capture must find ready; then the step is recorded, which does nothing by itself, and the rest of the epoch is launched.
So nothing has to be put back, and captured or not, the numbers are the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from esper._runtime import StopFlag
from esper.training.execution.gpu import Captured, Gpu
from esper.training.execution.graph_cache import (
    REPLACES,
    WAITS,
    CaptureCache,
    Signature,
    buffers_of,
    memory_of,
    obstacle,
    same_tensors,
    signature_of,
    step_signature,
)
from esper.training.execution.workers import Cancelled, DeviceFailed, HasPlace, first_of
from esper.training.host_training import HostTraining, do
from esper.training.micro_batching import ran_out
from esper.training.step import begin_epoch, train_step

WARM_UP = 3
"""Ordinary steps before a capture: libraries choose their algorithms, and the allocator has seen every size."""

Env = TypeVar("Env", bound=HasPlace)
Failures = list[tuple[HasPlace, Exception]]


class StreamLanes:
    """One lane an env, which are all worked on at once. See Lanes for what it does; here, work is queued.

    Args:
        gpu: where.
        capture: whether work is captured; if not, all of it is queued by Python.
    """

    def __init__(self, gpu: Gpu, capture: bool = True) -> None:
        self.gpu = gpu
        self.capture = capture
        self.capture_seconds = 0.0
        """Spent on capturing so far."""
        self._stop = StopFlag()
        self._cut_short = False
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._pools: dict[int, Any] = {}
        self._caches: dict[int, CaptureCache] = {}
        self._adopted: dict[int, HostTraining] = {}
        self._reasons: Counter[str] = Counter()
        """Of caches that are gone."""

    def run(self, work: Callable[[Env], None], envs: Iterable[Env]) -> None:
        """Does ``work`` for every env, each on its own stream. An env that fails does not stop the others.

        Raises LaneError after all envs were queued if one failed, DeviceFailed if the GPU failed outside the work of
        any env, and Cancelled if work was left out.
        """
        envs = list(envs)

        def queue(failures: Failures) -> None:
            for training in envs:
                if self._stop.is_set:
                    self._cut_short = True
                else:
                    self._guarded(training, work, failures)

        self._forked(envs, queue)

    def train(self, envs: Sequence[HostTraining], before: Callable[[HostTraining], None] = lambda _env: None) -> None:
        """One epoch of every env, from data that lies on the GPU; ``before`` comes first, on the env's stream. Raises
        LaneError, DeviceFailed and Cancelled as :meth:`run`."""
        self._forked(envs, lambda failures: self._epoch([_Epoch(training, before) for training in envs], failures))

    def adopt(self, envs: Iterable[HostTraining]) -> None:
        """What these envs repeat is captured, too, until :meth:`release`."""
        for training in envs if self.capture else ():
            self._adopted[training.index] = training
            training.repeat = partial(self._repeat, training)

    def release(self, envs: Iterable[HostTraining]) -> None:
        """Drop what was captured of these envs, and hold nothing of theirs; a second call does nothing. If that fails
        for one of them, the others are released nevertheless."""
        with ExitStack() as released:
            for training in envs:
                if self._adopted.pop(training.index, None) is not None:
                    training.repeat = do
                cache = self._caches.pop(training.index, None)
                if cache is not None:
                    self._reasons += cache.reasons
                    released.callback(cache.clear)

    def reasons(self) -> dict[str, int]:
        """Why work was not captured: the reason, and how many kinds of work of how many envs had it."""
        return dict(sum((cache.reasons for cache in self._caches.values()), self._reasons))

    @property
    def cancelled(self) -> bool:
        """Whether the epoch that is under way was cancelled."""
        return self._stop.is_set

    def cancel(self) -> None:
        """Launch no more steps of the epoch that is under way; from any thread."""
        self._stop.set()

    def close(self) -> None:
        """Wait for what was queued and drop what was captured, even on a broken GPU; a second call does nothing."""
        with ExitStack() as closed:
            for cache in self._caches.values():
                closed.callback(cache.clear)
            closed.callback(self.release, list(self._adopted.values()))
            if self._streams:
                self.gpu.synchronize()
        self.gpu.reuse(self._streams.values())
        self._streams.clear()

    def __enter__(self) -> StreamLanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forked(self, envs: Sequence[HasPlace], queue: Callable[[Failures], object]) -> None:
        """Streams take up what was queued before, and are waited for by what is queued after."""
        failures: Failures = []
        self._stop.clear()
        self._cut_short = False
        try:
            streams = [self._stream(training.index) for training in envs]
            self.gpu.fork(streams)
        except RuntimeError as error:
            raise _device_failed("began with", envs, error) from error
        try:
            queue(failures)
        except BaseException as error:
            self._join(streams, envs, error)
            raise
        first = first_of(failures) if failures else None
        self._join(streams, envs, first)
        if first is not None:
            raise first
        if self._cut_short:
            raise Cancelled("cancelled before all of the work was queued")

    def _join(self, streams: list[torch.cuda.Stream], envs: Sequence[HasPlace], first: BaseException | None) -> None:
        """Wait for ``streams``. If the GPU cannot, ``first``, the error that led to it, gets a note; without one, the
        error is raised as DeviceFailed."""
        try:
            self.gpu.join(streams)
        except RuntimeError as error:
            failed = _device_failed("was to end with", envs, error)
            if first is None:
                raise failed from error
            first.add_note(f"After that, {failed}")

    def _guarded(self, training: Env, work: Callable[[Env], object], failures: Failures) -> bool:
        """Whether ``work`` went well, on the env's stream."""
        try:
            with self.gpu.on(self._stream(training.index)):
                work(training)
        except Exception as error:
            failures.append((training, error))
            return False
        return True

    def _epoch(self, epochs: list[_Epoch], failures: Failures) -> None:
        epochs = [epoch for epoch in epochs if self._guarded(epoch.env, partial(self._begin, epoch), failures)]
        fresh = [epoch for epoch in epochs if epoch.fresh]
        self._step_in_turns(fresh, WARM_UP - 1, failures)
        for epoch in fresh:
            if epoch.left > 1 and not epoch.failed and not self._stop.is_set:
                epoch.failed = not self._guarded(epoch.env, partial(self._last_before_capture, epoch), failures)
        self._launch([epoch for epoch in epochs if epoch.captured is not None and not epoch.failed], failures)
        self._step_in_turns([epoch for epoch in epochs if epoch.captured is None], None, failures)
        for epoch in epochs:
            if epoch.left and not epoch.failed:
                self._cut_short = True
            elif not epoch.failed:
                epoch.env.epoch += 1

    def _begin(self, epoch: _Epoch, training: HostTraining) -> None:
        epoch.begin(training)
        epoch.fresh = self.capture and self._wants_capture(epoch)

    def _wants_capture(self, epoch: _Epoch) -> bool:
        """Whether the epoch's step is to be captured. If it was captured before, sets ``epoch.captured``."""
        training = epoch.env
        cache, epoch.signature = self._cache(training), step_signature(training)
        epoch.captured = cache.get(epoch.signature)
        if epoch.captured is not None or cache.refuses(epoch.signature):
            return False
        reason = obstacle(training)
        if reason is not None:
            cache.refuse(epoch.signature, reason)
            return False
        cache.make_room()
        return True

    def _last_before_capture(self, epoch: _Epoch, training: HostTraining) -> None:
        batches = training.collector.batches + 1
        epoch.captured = self._do_and_capture(training, epoch.signature, lambda: epoch.step(training), epoch.work)
        training.collector.batches = batches  # the step was recorded, and not done

    def _repeat(self, training: HostTraining, key: Hashable, work: Callable[[], None]) -> None:
        """Do what ``env`` does again and again, on its lane. When it is done for the second time it is captured, and
        launched from then on; much is never done again."""
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
        """Do ``first``, which is the same as ``work``, and see whether it can be captured; then record ``work``, on the
        env's stream. None, with the reason in the cache, where that cannot be done."""
        cache, before = self._cache(training), buffers_of(training)
        reason = WAITS if self.gpu.waits(first) else None
        if reason is None and not same_tensors(before, buffers_of(training)):
            reason = REPLACES
        if reason is not None:
            cache.refuse(signature, reason)
            return None
        start = time.perf_counter()
        if training.index not in self._pools:
            self._pools[training.index] = self.gpu.pool()
        pool, keeps = self._pools[training.index], (work, *memory_of(training))
        try:
            captured = self.gpu.capture(work, self._stream(training.index), pool, keeps)
        except BaseException as error:
            self._drop_after(error, cache)
            if not isinstance(error, Exception) or ran_out(error):  # less memory at once may do
                raise
            cache.refuse(signature, f"{type(error).__name__}: {error}")  # a network may do anything in its forward pass
            return None
        finally:
            self.capture_seconds += time.perf_counter() - start
        cache.put(signature, captured)
        return captured

    def _drop_after(self, error: BaseException, cache: CaptureCache) -> None:
        """Give back the memory of a capture that failed. That ends the env's other captured work (see Gpu.give_back),
        which is dropped and captured again when it is next repeated."""
        try:
            cache.drop()
        except RuntimeError as failed:
            error.add_note(f"After that, the GPU failed: {type(failed).__name__}: {failed}")
            raise error from None

    def _step_in_turns(self, epochs: list[_Epoch], most: int | None, failures: Failures) -> None:
        """At most so many steps of each, one env after the other, so that the GPU has work of all of them."""
        done = 0
        while epochs and done != most and not self._stop.is_set:
            epochs = [epoch for epoch in epochs if epoch.left and not epoch.failed]
            for epoch in epochs:
                epoch.failed = not self._guarded(epoch.env, epoch.step, failures)
            done += 1

    def _launch(self, epochs: list[_Epoch], failures: Failures) -> None:
        captured = [epoch.captured for epoch in epochs if epoch.captured is not None]
        if not captured:
            return
        streams = [self._stream(epoch.env.index) for epoch in epochs]
        result = self.gpu.launch(captured, streams, [epoch.left for epoch in epochs], self._stop)
        for epoch, launched in zip(epochs, result.launched, strict=True):
            epoch.advance(launched)
        for lane, _step, _code, text in result.failures:
            epochs[lane].fail()
            failures.append((epochs[lane].env, RuntimeError(text)))

    def _stream(self, index: int) -> torch.cuda.Stream:
        if index not in self._streams:
            self._streams[index] = self.gpu.stream()
        return self._streams[index]

    def _cache(self, training: HostTraining) -> CaptureCache:
        if training.index not in self._caches:
            self._caches[training.index] = CaptureCache(partial(self._before_drop, training), self.gpu.give_back)
        return self._caches[training.index]

    def _before_drop(self, training: HostTraining) -> None:
        """Nothing of the env's captured work is under way, and its memory is in use no more."""
        self.gpu.synchronize()
        for group in (training.host_group, *training.pool.groups.values()):
            for parameter in group.parameters:
                parameter.grad = None  # of the last step that was recorded, in the memory of the captured work
        self._pools.pop(training.index, None)


def _device_failed(what: str, envs: Sequence[HasPlace], error: RuntimeError) -> DeviceFailed:
    names = ", ".join(str(training.index) for training in envs)
    return DeviceFailed(f"the GPU failed when it {what} env {names}: {type(error).__name__}: {error}")


class _Epoch:
    """An env on its way through an epoch."""

    signature: Signature

    def __init__(self, training: HostTraining, before: Callable[[HostTraining], None]) -> None:
        assert training.feed is not None
        self.env, self.feed, self.before = training, training.feed, before
        self.left = training.feed.batches
        """Steps to do."""
        self.captured: Captured | None = None
        self.fresh = False
        """Whether the step is to be captured in this epoch."""
        self.failed = False

    def begin(self, training: HostTraining) -> None:
        self.before(training)
        groups, feed = begin_epoch(training), self.feed
        feed.begin(training.epoch, training.order)
        training.batch = 0

        def work() -> None:
            train_step(training, groups, *feed.batch(training.batch))

        self.work = work
        """What a step puts on the stream."""

    def step(self, _env: HostTraining) -> None:
        """One ordinary step."""
        self.env.batch = self.feed.batches - self.left
        self.work()
        self.left -= 1

    def advance(self, launched: int) -> None:
        """So many steps were launched, of which Python has seen nothing."""
        self.left -= launched
        self.env.batch = max(self.feed.batches - self.left - 1, 0)
        self.env.collector.batches += launched

    def fail(self) -> None:
        """The step after those that were done could not be launched."""
        self.failed = True
        self.env.batch = self.feed.batches - self.left
