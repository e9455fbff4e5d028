"""Buffers of a host for an incubating seed.

The shadow pass of a seed runs through layers with buffers that training updates: BatchNorm's running statistics, or a
user's own moving averages. Statistics gathered without the seed would be wrong in its trial: a seed that merely shifts
features would fail. So each incubating seed has its own buffers, which its shadow passes update and its trials use; the
host's are never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from esper.seeds.blend import Seed


class ShadowBuffers:
    """Copies of all buffers of ``network``, with their current values at first."""

    def __init__(self, network: nn.Module) -> None:
        found = ((module, _buffers(module)) for module in network.modules())
        self._copies = [(module, {name: b.clone() for name, b in own.items()}) for module, own in found if own]

    def refill(self) -> None:
        """Copies the network's current buffers again, in place unless a shape or dtype has changed."""
        for module, copies in self._copies:
            for name, buffer in _buffers(module).items():
                copy = copies.get(name)
                if copy is not None and (copy.shape, copy.dtype) == (buffer.shape, buffer.dtype):
                    copy.copy_(buffer)
                else:
                    copies[name] = buffer.clone()

    def tensors(self) -> list[Tensor]:
        """Returns the copies, in a fixed order."""
        return [buffer for _, copies in self._copies for buffer in copies.values()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes the network use and, in train mode, update these copies instead of its own buffers."""
        owned = [_buffers(module) for module, _ in self._copies]
        for module, copies in self._copies:
            _install(module, copies)
        try:
            yield
        finally:
            for (module, copies), own in zip(self._copies, owned, strict=True):
                copies.update(_buffers(module))  # a layer may have replaced a buffer by a new tensor
                _install(module, own)


@contextmanager
def copied_buffers(seeds: Iterable[Seed]) -> Iterator[None]:
    """Lends seeds copies of their buffers, such as running statistics in a user's blueprint; their own stay as they
    are."""
    with ExitStack() as stack:
        for seed in seeds:
            if seed.has_buffers:
                stack.enter_context(ShadowBuffers(seed).in_place())
        yield


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False))


def _install(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(module, name, buffer)
