"""What captured work of an env stands for, why some cannot be captured, and what is kept."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

from torch import Tensor, nn

from esper.seeds.site import Role, Site
from esper.training.execution.gpu import Captured
from esper.training.host_training import HostTraining
from esper.training.rng import OwnedDropout

Signature = Hashable

MAX_KEPT = 32
"""Captured work of one env. A slot is empty, incubating, blended or fading, with one of several blueprints, and each
such host is trained and validated."""

MAX_REMEMBERED = 256
"""Signatures of an env of which only is known that they were met, or refused."""

WAITS = "it waits for the GPU, as .item() does"
REPLACES = "a layer puts a new tensor in the place of a buffer, where a captured step would not look for it"


def signature_of(training: HostTraining) -> Signature:
    """Two passes of equal signature do the same work on the same memory; numbers that differ are read on the device.

    It holds the seeds themselves, so that none of them is freed and mistaken for another while it is known.
    """
    return tuple((site.seed, site.role, site.learning) if _takes_part(site) else None for site in training.sites)


def step_signature(training: HostTraining) -> Signature:
    """That of the env's training steps; the seed of augmentation and the cuts of a batch are part of them."""
    assert training.feed is not None
    return ("step", training.feed.seed, training.micro_batches, signature_of(training))


def memory_of(training: HostTraining) -> tuple[object, ...]:
    """What the env's passes read and write that is not the env's for as long as it lives."""
    seeds = [site.seed for site in training.sites if site.seed is not None]
    return (
        *seeds,
        *training.seed_groups.values(),
        *(site.finite for site in training.sites),
        *training.shadows.values(),
    )


def buffers_of(training: HostTraining) -> list[Tensor]:
    """Of all networks that take part, as they are now."""
    return [buffer for network in _networks(training) for buffer in network.buffers()]


def same_tensors(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether these are the very same ones, whatever is in them."""
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


def obstacle(training: HostTraining) -> str | None:
    """Why the env's training step cannot be captured; None where nothing is known that speaks against it."""
    if training.arithmetic.overflows:
        return "float16: its loss scale is kept by torch's GradScaler, in Python"
    if training.host_draws_globally or any(
        site.name in training.global_seeds for site in training.sites if _takes_part(site)
    ):
        return "a network draws from torch's own generator"
    if any(isinstance(m, OwnedDropout) and m.p > 0 for network in _networks(training) for m in network.modules()):
        return "dropout: launched without torch, a captured step would draw the same numbers every time"
    return None


def _takes_part(site: Site) -> bool:
    return site.role is not Role.ABSENT


def _networks(training: HostTraining) -> list[nn.Module]:
    return [training.host, *(site.seed for site in training.sites if site.seed is not None and _takes_part(site))]


class CaptureCache:
    """The captured work of one env.

    It is dropped all at once: from PyTorch 2.12 on, the end of a graph frees the workspaces of cuBLAS on its stream,
    which all graphs that were captured there use. So there has to be room before work is warmed up for its capture, and
    a capture that failed ends all the others.

    Args:
        before: called before captured work is dropped; it is dropped even if this raises.
        after: called when it is.
        most: pieces of captured work, beyond which there is no room.
    """

    def __init__(self, before: Callable[[], None], after: Callable[[], None], most: int = MAX_KEPT) -> None:
        self.before, self.after, self.most = before, after, most
        self._kept: dict[Signature, Captured] = {}
        self._met: OrderedDict[Signature, None] = OrderedDict()
        self._refused: OrderedDict[Signature, None] = OrderedDict()
        self.reasons: Counter[str] = Counter()
        """Why work was refused, and how often another work was."""

    def get(self, signature: Signature) -> Captured | None:
        return self._kept.get(signature)

    def put(self, signature: Signature, captured: Captured) -> None:
        self._kept[signature] = captured

    def make_room(self) -> None:
        """Everything is dropped where one more would be too much."""
        if len(self._kept) >= self.most:
            self.clear()

    def clear(self) -> None:
        """Drop everything, if there is anything."""
        if self._kept:
            self.drop()

    def drop(self) -> None:
        """Drop everything, and call ``before`` and ``after`` also if nothing is kept: after a failed capture."""
        try:
            self.before()
        finally:
            self._kept.clear()
            self.after()

    def meet(self, signature: Signature) -> bool:
        """Whether it was met before."""
        known = signature in self._met
        _remember(self._met, signature)
        return known

    def refuse(self, signature: Signature, reason: str) -> None:
        """Do not capture work of this signature."""
        self.reasons[reason] += 1
        _remember(self._refused, signature)

    def refuses(self, signature: Signature) -> bool:
        return signature in self._refused

    def __len__(self) -> int:
        return len(self._kept)


def _remember(known: OrderedDict[Signature, None], signature: Signature) -> None:
    known[signature] = None
    known.move_to_end(signature)
    while len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
