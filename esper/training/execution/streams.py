"""Lanes on a GPU: one stream per env, and work that is captured once as a CUDA graph and replayed without Python.

The first epoch of a training step begins with a few ordinary steps, which warm up everything that a capture needs. Then
the step is captured, which executes nothing, and the rest of the epoch is launched as a graph. So nothing has to be
undone, and the numbers are the same with and without capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from esper._runtime import StopFlag
from esper.training.execution.captured_work import CapturedWork
from esper.training.execution.gpu import Captured, Gpu
from esper.training.execution.graph_cache import (
    Signature,
    step_signature,
)
from esper.training.execution.lanes import Cancelled, DeviceFailed, Env, HasPlace, Lanes, first_of
from esper.training.host_training import HostTraining
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
        self.captured = CapturedWork(gpu, self._stream)

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
        if self.captures:
            self.captured.adopt(hosts)

    def release(self, hosts: Iterable[HostTraining]) -> None:
        self.captured.release(hosts)

    def reasons(self) -> dict[str, int]:
        return self.captured.reasons()

    @property
    def cancelled(self) -> bool:
        return self._stop.is_set

    def cancel(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Waits for queued work and drops what was captured, even on a broken GPU; a second call does nothing."""
        with ExitStack() as closed:
            closed.callback(self.captured.close)
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
            _join(self.gpu, streams, envs, error)
            raise
        first = first_of(self._failures) if self._failures else None
        _join(self.gpu, streams, envs, first)
        if first is not None:
            raise first
        if self._cut_short:
            raise Cancelled("cancelled before all of the work was queued")

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
        captured = self.captured if self.captures else None
        epochs = [epoch for epoch in epochs if self._guarded(epoch.training, partial(_begin, captured, epoch))]
        fresh = [epoch for epoch in epochs if epoch.fresh]
        self._step_in_turns(fresh, WARM_UP - 1)
        for epoch in fresh:
            if epoch.left > 1 and not epoch.failed and not self._stop.is_set:
                epoch.failed = not self._guarded(epoch.training, partial(_last_before_capture, self.captured, epoch))
        self._launch([epoch for epoch in epochs if epoch.captured is not None and not epoch.failed])
        self._step_in_turns([epoch for epoch in epochs if epoch.captured is None])
        for epoch in epochs:
            if epoch.left and not epoch.failed:
                self._cut_short = True
            elif not epoch.failed:
                epoch.training.epoch += 1

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


def _begin(captured: CapturedWork | None, epoch: _Epoch, training: HostTraining) -> None:
    """Begins the epoch and looks up its step, which is ``captured`` if it is known, or ``fresh`` if it can be."""
    epoch.begin()
    if captured is not None:
        epoch.signature = step_signature(training)
        epoch.captured, epoch.fresh = captured.look_up(training, epoch.signature)


def _last_before_capture(captured: CapturedWork, epoch: _Epoch, training: HostTraining) -> None:
    batches = training.collector.batches + 1
    first = partial(epoch.step, training)
    epoch.captured = captured.do_and_capture(training, epoch.signature, first, epoch.work)
    training.collector.batches = batches  # the capture executed nothing


def _join(gpu: Gpu, streams: list[torch.cuda.Stream], envs: Sequence[HasPlace], first: BaseException | None) -> None:
    """Makes later work wait for ``streams``.

    If the GPU fails here, the error ``first`` that led to it gets a note; without one, DeviceFailed is raised.
    """
    try:
        gpu.join(streams)
    except RuntimeError as error:
        failed = _device_failed("ended", envs, error)
        if first is None:
            raise failed from error
        first.add_note(f"After that, {failed}")
