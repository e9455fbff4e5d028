"""The captured work of the hosts on one GPU: what is captured, refused, replayed and dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

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
)
from esper.training.host_training import HostTraining, do
from esper.training.micro_batching import ran_out


class CapturedWork:
    """Captures what hosts repeat, each on its own stream and in its own memory pool.

    Args:
        gpu: the device.
        stream: returns the stream of the host with this index.
    """

    def __init__(self, gpu: Gpu, stream: Callable[[int], torch.cuda.Stream]) -> None:
        self.gpu, self._stream = gpu, stream
        self.caches: dict[int, CaptureCache] = {}
        """Captured work by index of the host."""
        self._pools: dict[int, Any] = {}
        self._adopted: dict[int, HostTraining] = {}
        self._reasons: Counter[str] = Counter()  # of released caches

    def adopt(self, hosts: Iterable[HostTraining]) -> None:
        """Captures and replays what these hosts repeat."""
        for training in hosts:
            self._adopted[training.index] = training
            training.repeat = partial(self.repeat, training)

    def release(self, hosts: Iterable[HostTraining]) -> None:
        """Drops what was captured for ``hosts``, even if that fails for one of them, as on a broken GPU."""
        with ExitStack() as released:
            for training in hosts:
                if self._adopted.pop(training.index, None) is not None:
                    training.repeat = do
                cache = self.caches.pop(training.index, None)
                if cache is not None:
                    self._reasons += cache.reasons
                    released.callback(cache.clear)

    def reasons(self) -> dict[str, int]:
        """Returns why work was not captured, with the number of pieces of work."""
        return dict(sum((cache.reasons for cache in self.caches.values()), self._reasons))

    def look_up(self, training: HostTraining, signature: Signature) -> tuple[Captured | None, bool]:
        """Returns the captured step, if there is one, and whether it can be captured now."""
        cache = self.cache(training)
        captured = cache.get(signature)
        if captured is not None or cache.refuses(signature):
            return captured, False
        reason = capture_obstacle(training)
        if reason is not None:
            cache.refuse(signature, reason)
            return None, False
        cache.make_room()
        return None, True

    def repeat(self, training: HostTraining, key: Hashable, work: Callable[[], None]) -> None:
        """Does ``work`` on the host's lane: captures it the second time, since much is never repeated, and replays it
        from then on."""
        cache, signature = self.cache(training), (key, signature_of(training))
        captured = cache.get(signature)
        if captured is not None:
            captured.replay()
        elif cache.refuses(signature) or not cache.meet(signature):
            work()
        else:
            cache.make_room()
            self.do_and_capture(training, signature, work, work)

    def do_and_capture(
        self, training: HostTraining, signature: Signature, first: Callable[[], None], work: Callable[[], None]
    ) -> Captured | None:
        """Does ``first``, which equals ``work``, to see whether it can be captured, and captures ``work``.

        Returns None, with the reason in the cache, if it cannot.
        """
        cache, before = self.cache(training), buffers_of(training)
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

    def cache(self, training: HostTraining) -> CaptureCache:
        """Returns the cache of one host."""
        if training.index not in self.caches:
            self.caches[training.index] = CaptureCache(partial(self._before_drop, training), self.gpu.give_back)
        return self.caches[training.index]

    def _before_drop(self, training: HostTraining) -> None:
        """Waits for captured work, and lets go of its memory: gradients of the last captured step, and the pool."""
        self.gpu.synchronize()
        for group in (training.host_group, *training.pool.groups.values()):
            for parameter in group.parameters:
                parameter.grad = None
        self._pools.pop(training.index, None)

    def close(self) -> None:
        """Drops everything, even if that fails for one of the hosts, as on a broken GPU."""
        with ExitStack() as closed:
            for cache in self.caches.values():
                closed.callback(cache.clear)
            closed.callback(self.release, list(self._adopted.values()))
