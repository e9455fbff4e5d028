"""What a captured step of an env stands for, and the few captured steps that are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from esper.seeds.stage import SeedStage
from esper.training.env_state import ParallelEnvState
from esper.training.gpu import Captured
from esper.training.randomness import OwnedDropout

Signature = Hashable

MOST_KEPT = 16
"""Captured steps of one env. A slot is empty, incubating, blended or fading, with one of several blueprints."""

WARM_UP = 2
"""Times that work of an epoch is done before it is captured; it may never come again."""


def signature_of(env: ParallelEnvState) -> Signature:
    """Two epochs of equal signature do the same work on the same memory; numbers that differ are read on the device."""
    assert env.feed is not None
    slots = tuple(
        (id(slot.seed), slot.incubating, slot.stage is SeedStage.FOSSILIZED, slot.learning)
        if slot.incubating or slot.blended
        else None
        for slot in env.slots
    )
    shadows = tuple(id(env.shadow_of(slot)) for slot in env.slots if slot.incubating)
    return (env.feed.seed, slots, shadows)


def memory_of(env: ParallelEnvState) -> tuple[object, ...]:
    """What the env's steps read and write that is not the env's for as long as it lives."""
    seeds = [slot.seed for slot in env.slots if slot.seed is not None]
    return (*seeds, *env.seed_groups.values(), *(slot.finite for slot in env.slots), *env.shadows.values())


def obstacle(env: ParallelEnvState) -> str | None:
    """Why the env's step cannot be captured; None where it can."""
    if env.arithmetic.overflows:
        return "float16: its loss scale is kept by torch's GradScaler, in Python"
    if env.draws_globally:
        return "a network draws from torch's own generator"
    networks = (env.host, *(slot.seed for slot in env.slots if slot.seed is not None))
    if any(isinstance(m, OwnedDropout) and m.p > 0 for network in networks for m in network.modules()):
        return "dropout: launched without torch, a captured step would draw the same numbers every time"
    return None


class CaptureCache:
    """The captured work of one env, of one sort; what has been unused for longest goes when there is too much."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self._kept: OrderedDict[Signature, Captured] = OrderedDict()
        self.refused: dict[Signature, str] = {}
        """Why work of this signature is not captured."""

    def get(self, signature: Signature) -> Captured | None:
        found = self._kept.get(signature)
        if found is not None:
            self._kept.move_to_end(signature)
        return found

    def put(self, signature: Signature, captured: Captured) -> None:
        self._kept[signature] = captured
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)


class Repeater:
    """Does what an env does again and again; work done twice is captured, and launched from then on.

    Call it on the env's lane. ``capture`` records work on that lane.
    """

    def __init__(self, env: ParallelEnvState, capture: Callable[[Callable[[], None]], Captured]) -> None:
        self.env, self.capture = env, capture
        self.cache = CaptureCache()
        self._done: dict[Signature, int] = {}

    def __call__(self, key: Hashable, work: Callable[[], None]) -> None:
        signature = (key, signature_of(self.env))
        captured = self.cache.get(signature)
        if captured is not None:
            captured.replay()
            return
        work()
        self._done[signature] = self._done.get(signature, 0) + 1
        if self._done[signature] < WARM_UP or signature in self.cache.refused:
            return
        try:
            self.cache.put(signature, self.capture(work))
        except Exception as error:  # a network may do anything in its forward pass
            self.cache.refused[signature] = f"{type(error).__name__}: {error}"
        del self._done[signature]
