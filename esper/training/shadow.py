"""BatchNorm statistics of a host as an incubating seed would make them.

In its shadow pass a seed meets layers that normalise by the batch, seed included. Their running statistics, gathered
without the seed, would be wrong for its trial: a seed that merely shifts features would fail. So each incubating seed
keeps running statistics of its own, updated by its shadow passes and used by its trials; the host's are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.nn.modules.batchnorm import _BatchNorm

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class ShadowStatistics:
    """Copies of the running statistics of ``layers``, which start as the host's are now."""

    def __init__(self, layers: Sequence[_BatchNorm]) -> None:
        self._layers = layers
        self._copies = [{name: _clone(layer, name) for name in BUFFERS} for layer in layers]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The layers use and, in train mode, update these copies instead of the host's statistics."""
        hosts = [{name: getattr(layer, name) for name in BUFFERS} for layer in self._layers]
        self._install(self._copies)
        try:
            yield
        finally:
            self._install(hosts)

    def _install(self, buffers: list[dict[str, object]]) -> None:
        for layer, values in zip(self._layers, buffers, strict=True):
            for name, value in values.items():
                setattr(layer, name, value)


def _clone(layer: _BatchNorm, name: str) -> object:
    """A copy of one buffer; None for a layer that keeps no statistics."""
    buffer = getattr(layer, name)
    return None if buffer is None else buffer.clone()
