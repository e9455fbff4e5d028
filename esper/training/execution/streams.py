"""The executor on a GPU: a stream per host, and work that is captured once as a CUDA graph and replayed without Python.

The first epoch of a training step begins with a few ordinary steps, which warm up everything that a capture needs. Then
the step is captured, which executes nothing, and the rest of the epoch is launched as a graph. So nothing has to be
undone, and the numbers are the same with and without capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from esper._runtime import StopFlag
from esper.training.execution.gpu import Captured, Gpu
from esper.training.execution.graph_cache import HostGraphs, step_signature
from esper.training.executor import Cancelled, DeviceFailed, Executor, HasPlace, HostError, Placed, merged
from esper.training.host_training import HostTraining, do, feed_of
from esper.training.step import prepare_epoch, train_step

WARM_UP = 3
"""Ordinary steps before a capture, so that libraries choose their algorithms and the allocator has seen every size."""


class StreamExecutor(Executor):
    """One stream per host. Work is queued on the GPU, which executes that of all hosts at the same time.

    Args:
        gpu: the device.
        captures: whether repeated work is captured; if not, Python queues all of it.
    """

    def __init__(self, gpu: Gpu, captures: bool = True) -> None:
        self.gpu = gpu
        self.captures = captures
        self.graphs: dict[int, HostGraphs] = {}
        """Captured work by host."""
        self._reasons: Counter[str] = Counter()  # of hosts that were released
        self._stop = StopFlag()
        self._cut_short = False
        self._failures: list[HostError] = []  # of the current work
        self._streams: dict[int, torch.cuda.Stream] = {}

    def run(self, work: Callable[[Placed], None], hosts: Iterable[Placed]) -> None:
        hosts = list(hosts)

        def queue() -> None:
            for host in hosts:
                if self._stop.is_set:
                    self._cut_short = True
                    return
                self._guarded(host, partial(work, host))

        self._forked(hosts, queue)

    def train(
        self,
        hosts: Sequence[HostTraining],
        then: Callable[[HostTraining], None] | None = None,
    ) -> None:
        self._forked(hosts, partial(self._epoch, hosts))
        if then is not None:
            self.run(then, hosts)

    def adopt(self, hosts: Iterable[HostTraining]) -> None:
        for training in hosts:
            graphs = self._graphs_of(training)
            if graphs is not None:
                training.repeat = graphs.repeat

    def release(self, hosts: Iterable[HostTraining]) -> None:
        """Drops what was captured for ``hosts``, even if that fails for one of them, as on a broken GPU."""
        with ExitStack() as released:
            for training in hosts:
                graphs = self.graphs.pop(training.index, None)
                if graphs is None:
                    continue
                training.repeat = do
                self._reasons += graphs.reasons
                released.callback(graphs.clear)

    def reasons(self) -> dict[str, int]:
        total = Counter(self._reasons)
        for graphs in self.graphs.values():
            total += graphs.reasons
        return dict(total)

    @property
    def cancelled(self) -> bool:
        return self._stop.is_set

    def cancel(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Waits for queued work and drops what was captured, even on a broken GPU; a second call does nothing."""
        try:
            if self._streams:
                self.gpu.synchronize()
        finally:
            self.release([graphs.training for graphs in self.graphs.values()])
        self.gpu.reuse(self._streams.values())
        self._streams.clear()

    def _forked(self, hosts: Sequence[HasPlace], queue: Callable[[], object]) -> None:
        """Calls ``queue`` so that its work starts after everything queued before, and later work waits for it."""
        self._stop.clear()
        self._failures = []
        self._cut_short = False
        try:
            streams = [self._stream(host.index) for host in hosts]
            self.gpu.fork(streams)
        except RuntimeError as fault:
            raise _device_failed("began", hosts, fault) from fault

        # Whatever has failed, the streams are joined before it is raised.
        error: BaseException | None = None
        try:
            queue()
            if self._failures:
                error = merged(self._failures)
        except BaseException as raised:
            error = raised
        try:
            self.gpu.join(streams)
        except RuntimeError as fault:
            failed = _device_failed("ended", hosts, fault)
            if error is None:
                raise failed from fault
            error.add_note(f"After that, {failed}")

        if error is not None:
            raise error
        if self._cut_short:
            raise Cancelled("cancelled before all of the work was queued")

    def _guarded(self, host: HasPlace, work: Callable[[], object]) -> bool:
        """Does ``work`` on the host's stream; returns False if it failed."""
        try:
            with self.gpu.on(self._stream(host.index)):
                work()
        except Exception as error:
            self._failures.append(HostError(host, error))
            return False
        return True

    def _epoch(self, hosts: Sequence[HostTraining]) -> None:
        new = [_Epoch(training, self._graphs_of(training)) for training in hosts]
        epochs = [epoch for epoch in new if self._guarded(epoch.training, epoch.begin)]
        self._capture(epochs)
        self._launch(epochs)
        # Others are done step by step: those that cannot be captured, or have too few steps.
        self._step_in_turns([epoch for epoch in epochs if epoch.captured is None])
        for epoch in epochs:
            if epoch.failed:
                continue
            if epoch.left:
                self._cut_short = True
            else:
                epoch.training.epoch += 1

    def _capture(self, epochs: list[_Epoch]) -> None:
        """Warms up the steps that are to be captured in this epoch, and captures them."""
        self._step_in_turns([epoch for epoch in epochs if epoch.captures_in is not None], WARM_UP - 1)
        for epoch in epochs:
            graphs = epoch.captures_in
            if graphs is None or epoch.left <= 1 or epoch.failed or self._stop.is_set:
                continue
            epoch.failed = not self._guarded(epoch.training, partial(epoch.capture, graphs))

    def _launch(self, epochs: list[_Epoch]) -> None:
        """Launches the captured steps that are left of each epoch."""
        launched = []
        captured = []
        streams = []
        steps = []
        for epoch in epochs:
            if epoch.captured is None or epoch.failed:
                continue
            launched.append(epoch)
            captured.append(epoch.captured)
            streams.append(self._stream(epoch.training.index))
            steps.append(epoch.left)
        if not launched:
            return
        result = self.gpu.launch(captured, streams, steps, self._stop)

        # Python has seen none of these steps, so their counts are added here.
        for epoch, done in zip(launched, result.launched, strict=True):
            epoch.left -= done
            epoch.training.batch = max(epoch.batches - epoch.left - 1, 0)
            epoch.training.gradient_stats.batches += done
        for place, _step, _code, text in result.failures:
            epoch = launched[place]
            epoch.failed = True
            epoch.training.batch = epoch.batches - epoch.left  # the step that was not launched
            self._failures.append(HostError(epoch.training, RuntimeError(text)))

    def _step_in_turns(self, epochs: list[_Epoch], limit: int | None = None) -> None:
        """Does at most ``limit`` steps of each epoch, in turns, so that the GPU has work of all hosts."""
        done = 0
        while epochs and done != limit and not self._stop.is_set:
            epochs = [epoch for epoch in epochs if epoch.left and not epoch.failed]
            for epoch in epochs:
                epoch.failed = not self._guarded(epoch.training, epoch.step)
            done += 1

    def _stream(self, index: int) -> torch.cuda.Stream:
        if index not in self._streams:
            self._streams[index] = self.gpu.stream()
        return self._streams[index]

    def _graphs_of(self, training: HostTraining) -> HostGraphs | None:
        index = training.index
        if self.captures and index not in self.graphs:
            self.graphs[index] = HostGraphs(self.gpu, self._stream(index), training)
        return self.graphs.get(index)


def _device_failed(verb: str, hosts: Sequence[HasPlace], error: RuntimeError) -> DeviceFailed:
    names = ", ".join(str(host.index) for host in hosts)
    return DeviceFailed(f"the GPU failed as work {verb} for env {names}: {type(error).__name__}: {error}")


class _Epoch:
    """The progress of a host through an epoch. Without ``graphs``, nothing is captured."""

    def __init__(self, training: HostTraining, graphs: HostGraphs | None) -> None:
        self.training = training
        self.graphs = graphs
        self.feed = feed_of(training)
        self.batches = self.feed.batches
        """Steps of the epoch."""
        self.left = self.batches
        """Steps that are not done."""
        self.captured: Captured | None = None
        self.captures_in: HostGraphs | None = None
        """Where the step is to be captured in this epoch; None if it is not to be."""
        self.failed = False

    def begin(self) -> None:
        """Begins the epoch and looks up its step, which is ``captured`` if it is known, or can be in this epoch."""
        training = self.training
        feed = self.feed
        groups = prepare_epoch(training)
        training.batch = 0

        def work() -> None:
            x, y = feed.batch(training.batch)
            train_step(training, groups, x, y)

        self.work = work
        """Queues one step."""
        if self.graphs is None:
            return
        self.signature = step_signature(training)
        self.captured, fresh = self.graphs.look_up(self.signature)
        if fresh:
            self.captures_in = self.graphs

    def step(self) -> None:
        """Does one ordinary step."""
        self.training.batch = self.batches - self.left
        self.work()
        self.left -= 1

    def capture(self, graphs: HostGraphs) -> None:
        """Does the last ordinary step, and captures those that follow."""
        batches = self.training.gradient_stats.batches + 1
        self.captured = graphs.capture(self.signature, self.step, self.work)
        self.training.gradient_stats.batches = batches  # the capture executed nothing
