"""Buffers of a host as an incubating seed would make them.

In its shadow pass a seed meets layers with buffers that training updates: BatchNorm's running statistics, a user's own
moving averages. Gathered without the seed, they would be wrong for its trial: a seed that merely shifts features would
fail. So each incubating seed keeps buffers of its own, updated by its shadow passes and used by its trials; the host's
are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class ShadowBuffers:
    """Copies of all buffers below ``network``, which start as they are now."""

    def __init__(self, network: nn.Module) -> None:
        found = ((module, _buffers(module)) for module in network.modules())
        self._copies = [(module, {name: b.clone() for name, b in own.items()}) for module, own in found if own]

    def refill(self) -> None:
        """The copies are again as the network's buffers are now, in the memory they have where these have not changed
        their form."""
        for module, copies in self._copies:
            for name, buffer in _buffers(module).items():
                kept = copies.get(name)
                if kept is not None and (kept.shape, kept.dtype) == (buffer.shape, buffer.dtype):
                    kept.copy_(buffer)
                else:
                    copies[name] = buffer.clone()

    def tensors(self) -> list[Tensor]:
        """The copies, in an order that stays."""
        return [copy for _, copies in self._copies for copy in copies.values()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The network uses and, in train mode, updates these copies instead of its own buffers."""
        owned = [_buffers(module) for module, _ in self._copies]
        for module, copies in self._copies:
            _install(module, copies)
        try:
            yield
        finally:
            for (module, copies), own in zip(self._copies, owned, strict=True):
                copies.update(_buffers(module))  # a layer may have put a new tensor in the place of its old one
                _install(module, own)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False))


def _install(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(module, name, buffer)
