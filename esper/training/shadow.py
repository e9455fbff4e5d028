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

from esper.core.blend import Seed


class ShadowBuffers:
    """Copies of all buffers of ``network``, with their current values at first."""

    def __init__(self, network: nn.Module) -> None:
        self._copies: list[tuple[nn.Module, dict[str, Tensor]]] = []
        for module in network.modules():
            buffers = _buffers(module)
            if buffers:
                self._copies.append((module, {name: buffer.clone() for name, buffer in buffers.items()}))

    def refill(self) -> None:
        """Copies the network's current buffers again, in place unless a shape or dtype has changed."""
        for module, copies in self._copies:
            for name, buffer in _buffers(module).items():
                copy = copies.get(name)
                if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype:
                    copies[name] = buffer.clone()
                else:
                    copy.copy_(buffer)

    def tensors(self) -> list[Tensor]:
        """Returns the copies, in a fixed order."""
        tensors: list[Tensor] = []
        for _, copies in self._copies:
            tensors.extend(copies.values())
        return tensors

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes the network use and, in train mode, update these copies instead of its own buffers."""
        before = [_buffers(module) for module, _ in self._copies]
        for module, copies in self._copies:
            _install(module, copies)
        try:
            yield
        finally:
            for (module, copies), buffers in zip(self._copies, before, strict=True):
                copies.update(_buffers(module))  # a layer may have replaced a buffer by a new tensor
                _install(module, buffers)


@contextmanager
def copied_buffers(seeds: Iterable[Seed]) -> Iterator[None]:
    """Lends seeds copies of their buffers, such as running statistics in a user's blueprint.

    Their own stay as they are.
    """
    with ExitStack() as stack:
        for seed in seeds:
            if seed.has_buffers:
                stack.enter_context(ShadowBuffers(seed).in_place())
        yield


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None}


def _install(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    module._buffers.update(buffers)  # setattr would look for parameters and modules of these names, too
