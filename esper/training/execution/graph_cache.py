"""Captured work of a host: what makes two pieces of work equal, what cannot be captured, and the graphs."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from esper.core.site import PlantedSeed, Role, Site
from esper.training.execution.gpu import Captured, Gpu
from esper.training.executor import ran_out
from esper.training.host_training import HostTraining, feed_of
from esper.training.rng import has_dropout

Signature = Hashable

MAX_CAPTURED = 32
"""Max pieces of captured work per host, which trains and is validated with each set of seeds and stages."""

MAX_REMEMBERED = 256
"""Max signatures remembered (seen or refused) per host."""

WAITS = "it waits for the GPU, as .item() does"
REPLACES = "a layer replaces a buffer by a new tensor, but a captured step keeps using the old one"


def _active_seeds(training: HostTraining) -> list[tuple[Site, PlantedSeed]]:
    """Returns the seeds that take part in passes with their sites, in site order."""
    sites = (site for site in training.sites if site.role is not Role.ABSENT)
    return [(site, site.planted) for site in sites if site.planted is not None]


def signature_of(training: HostTraining) -> Signature:
    """Returns a value that is equal for passes that do the same work on the same memory.

    It refers to the modules of seeds, so that none is freed and mistaken for another. Numbers that differ between such
    passes are read on the device.
    """
    parts: list[Hashable] = [training.shapes]
    for site, seed in _active_seeds(training):
        parts.append((site.name, seed.module, site.role, site.learning))
    return tuple(parts)


def step_signature(training: HostTraining) -> Signature:
    """Returns the signature of a training step, which includes the augmentation's seed."""
    return ("step", feed_of(training).seed, signature_of(training))


def memory_of(training: HostTraining) -> tuple[object, ...]:
    """All that passes read and write and that may be freed before the host."""
    parts: list[object] = []
    for _, seed in _active_seeds(training):
        parts.extend((seed.module, seed.finite))
    return (*parts, *training.seed_groups.values(), *training.shadows.values())


def _networks(training: HostTraining) -> list[nn.Module]:
    seeds = [seed.module for _, seed in _active_seeds(training)]
    return [training.host, *seeds]


def buffers_of(training: HostTraining) -> list[Tensor]:
    """Returns the current buffers of all networks that take part in passes."""
    buffers: list[Tensor] = []
    for network in _networks(training):
        buffers.extend(network.buffers())
    return buffers


def capture_obstacle(training: HostTraining) -> str | None:
    """Returns the reason why the host's training step cannot be captured, or None if it can be tried."""
    if training.arithmetic.precision == "float16":
        return "float16: its loss scale is kept by torch's GradScaler, in Python"
    active = {site.name for site, _ in _active_seeds(training)}
    if training.host_draws_globally or training.global_seeds & active:
        return "a network draws from torch's own generator"
    if any(map(has_dropout, _networks(training))):
        return "dropout: launched without torch, a captured step would draw the same numbers every time"
    return None


class HostGraphs:
    """The captured work of one host, on its own stream and in its own memory pool.

    It is dropped all at once: from PyTorch 2.12 on, destroying a graph frees the workspaces of cuBLAS on its stream,
    which all graphs captured there use. So there must be room before work is warmed up for its capture, and a failed
    capture ends all others.
    """

    def __init__(self, gpu: Gpu, stream: torch.cuda.Stream, training: HostTraining) -> None:
        self.gpu = gpu
        self.stream = stream
        self.training = training
        self.limit = MAX_CAPTURED
        """Pieces of captured work above which there is no room."""
        self.reasons: Counter[str] = Counter()
        """Reasons for refused work, with the number of pieces of work."""
        self._captured: dict[Signature, Captured] = {}
        self._refused: OrderedDict[Signature, bool] = OrderedDict()
        """Signatures that were seen, the latest last, and whether they are refused."""
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._captured)

    def look_up(self, signature: Signature) -> tuple[Captured | None, bool]:
        """Returns the captured training step, if there is one, and whether it can be captured now."""
        captured = self._captured.get(signature)
        if captured is not None or self._refused.get(signature):
            return captured, False
        reason = capture_obstacle(self.training)
        if reason is not None:
            self._refuse(signature, reason)
            return None, False
        self.make_room()
        return None, True

    def repeat(self, key: Hashable, work: Callable[[], None]) -> None:
        """Does ``work``: captures it the second time, since much is never repeated, and replays it from then on."""
        signature = (key, signature_of(self.training))
        captured = self._captured.get(signature)
        refused = self._refused.get(signature)
        if captured is not None:
            captured.replay()
            return
        if not refused:
            self._remember(signature, refused=False)
        if refused is False:  # not None: it was seen before
            self.make_room()
            self.capture(signature, work, work)
        else:
            work()

    def capture(
        self,
        signature: Signature,
        first: Callable[[], None],
        work: Callable[[], None],
    ) -> Captured | None:
        """Does ``first``, which equals ``work``, to see whether it can be captured, and captures ``work``.

        Returns None, with the reason in ``reasons``, if it cannot.
        """
        buffers = buffers_of(self.training)
        # An ordinary pass shows what cannot be captured, without the harm of a capture that fails.
        if self.gpu.waits(first):
            self._refuse(signature, WAITS)
            return None
        if list(map(id, buffers)) != list(map(id, buffers_of(self.training))):
            self._refuse(signature, REPLACES)
            return None

        if self._pool is None:
            self._pool = self.gpu.pool()
        keeps = (work, *memory_of(self.training))
        try:
            captured = self.gpu.capture(work, self.stream, self._pool, keeps)
        except BaseException as error:
            self._drop_after(error)
            if not isinstance(error, Exception) or ran_out(error):  # the run ends with advice
                raise
            self._refuse(signature, f"{type(error).__name__}: {error}")  # a network may do anything in its forward pass
            return None
        self._captured[signature] = captured
        return captured

    def make_room(self) -> None:
        """Drops everything if there is no room for one more."""
        if len(self._captured) >= self.limit:
            self.clear()

    def clear(self) -> None:
        """Drops everything, if there is anything."""
        if self._captured:
            self._drop()

    def _drop_after(self, error: BaseException) -> None:
        """Gives back the memory of a failed capture, which ends the host's other captured work (see Gpu.give_back)."""
        try:
            self._drop()
        except RuntimeError as failed:
            error.add_note(f"After that, the GPU failed: {type(failed).__name__}: {failed}")
            raise error from None

    def _drop(self) -> None:
        """Drops everything once the GPU is done with it, even if the GPU has failed.

        Gradients of the last captured step lie in the pool, which cannot be used again.
        """
        try:
            self.gpu.synchronize()
            for group in (self.training.host_group, *self.training.pool.groups.values()):
                group.drop_gradients()
            self._pool = None
        finally:
            self._captured.clear()
            self.gpu.give_back()

    def _refuse(self, signature: Signature, reason: str) -> None:
        """Remembers that work of this signature is not to be captured."""
        self.reasons[reason] += 1
        self._remember(signature, refused=True)

    def _remember(self, signature: Signature, refused: bool) -> None:
        self._refused[signature] = refused
        self._refused.move_to_end(signature)
        while len(self._refused) > MAX_REMEMBERED:
            self._refused.popitem(last=False)
