"""Captured work of an env: what makes two pieces of work equal, what cannot be captured, and a cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor, nn

from esper.seeds.blend import Seed
from esper.seeds.site import Role
from esper.training.execution.gpu import Captured
from esper.training.host_training import HostTraining
from esper.training.rng import OwnedDropout

Signature = Hashable

MAX_KEPT = 32
"""Max pieces of captured work per env: a host trains and is validated with each set of seeds and stages."""

MAX_REMEMBERED = 256
"""Max signatures remembered (seen or refused) per env."""

WAITS = "it waits for the GPU, as .item() does"
REPLACES = "a layer replaces a buffer by a new tensor, but a captured step keeps using the old one"


@dataclass(frozen=True)
class _ActiveSeed:
    """A seed that takes part in passes. It is part of signatures, so that no seed is freed and mistaken for another."""

    site: str
    seed: Seed
    role: Role
    learning: bool
    finite: Tensor | None = field(compare=False)


def _active_seeds(training: HostTraining) -> tuple[_ActiveSeed | None, ...]:
    """Returns the seed of each site, in order; None for a site that passes do not change."""
    return tuple(
        _ActiveSeed(site.name, site.seed, site.role, site.learning, site.finite)
        if site.seed is not None and site.role is not Role.ABSENT
        else None
        for site in training.sites
    )


def signature_of(training: HostTraining) -> Signature:
    """Returns a value that is equal for passes that do the same work on the same memory.

    Numbers that differ between such passes are read on the device.
    """
    return _active_seeds(training)


def step_signature(training: HostTraining) -> Signature:
    """Returns the signature of a training step, which includes the augmentation's seed and the micro-batches."""
    assert training.feed is not None
    return ("step", training.feed.seed, training.micro_batches, signature_of(training))


def memory_of(training: HostTraining) -> tuple[object, ...]:
    """Returns what passes read and write that may be freed before the env."""
    active = [seed for seed in _active_seeds(training) if seed is not None]
    return (
        *(seed.seed for seed in active),
        *(seed.finite for seed in active),
        *training.seed_groups.values(),
        *training.shadows.values(),
    )


def buffers_of(training: HostTraining) -> list[Tensor]:
    """Returns the current buffers of all networks that take part in passes."""
    return [buffer for network in _networks(training) for buffer in network.buffers()]


def same_tensors(first: list[Tensor], second: list[Tensor]) -> bool:
    """Returns True if both lists hold the same tensor objects, whatever their values."""
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


def capture_obstacle(training: HostTraining) -> str | None:
    """Returns the reason why the env's training step cannot be captured, or None if it can be tried."""
    if training.arithmetic.overflows:
        return "float16: its loss scale is kept by torch's GradScaler, in Python"
    active = {seed.site for seed in _active_seeds(training) if seed is not None}
    if training.host_draws_globally or training.global_seeds & active:
        return "a network draws from torch's own generator"
    if any(isinstance(m, OwnedDropout) and m.p > 0 for network in _networks(training) for m in network.modules()):
        return "dropout: launched without torch, a captured step would draw the same numbers every time"
    return None


def _networks(training: HostTraining) -> list[nn.Module]:
    return [training.host, *(active.seed for active in _active_seeds(training) if active is not None)]


class CaptureCache:
    """The captured work of one env.

    It is dropped all at once: from PyTorch 2.12 on, destroying a graph frees the workspaces of cuBLAS on its stream,
    which all graphs captured there use. So there must be room before work is warmed up for its capture, and a failed
    capture ends all others.

    Args:
        before: called before captured work is dropped, which happens even if this raises.
        after: called after captured work was dropped.
        limit: pieces of captured work above which there is no room.
    """

    def __init__(self, before: Callable[[], None], after: Callable[[], None], limit: int = MAX_KEPT) -> None:
        self.before, self.after, self.limit = before, after, limit
        self._kept: dict[Signature, Captured] = {}
        self._seen: OrderedDict[Signature, bool] = OrderedDict()  # the value: whether it is refused
        self.reasons: Counter[str] = Counter()
        """Why work was refused, with the number of pieces of work."""

    def get(self, signature: Signature) -> Captured | None:
        return self._kept.get(signature)

    def put(self, signature: Signature, captured: Captured) -> None:
        self._kept[signature] = captured

    def make_room(self) -> None:
        """Drops everything if there is no room for one more."""
        if len(self._kept) >= self.limit:
            self.clear()

    def clear(self) -> None:
        """Drops everything, if there is anything."""
        if self._kept:
            self.drop()

    def drop(self) -> None:
        """Drops everything, and calls ``before`` and ``after`` even if nothing is kept: after a failed capture."""
        try:
            self.before()
        finally:
            self._kept.clear()
            self.after()

    def meet(self, signature: Signature) -> bool:
        """Remembers the signature; returns whether it was seen before."""
        seen = signature in self._seen
        self._remember(signature, refused=False)
        return seen

    def refuse(self, signature: Signature, reason: str) -> None:
        """Remembers that work of this signature is not to be captured."""
        self.reasons[reason] += 1
        self._remember(signature, refused=True)

    def refuses(self, signature: Signature) -> bool:
        return self._seen.get(signature, False)

    def __len__(self) -> int:
        return len(self._kept)

    def _remember(self, signature: Signature, refused: bool) -> None:
        self._seen[signature] = refused
        self._seen.move_to_end(signature)
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)
