"""Counts of floating-point operations, by PyTorch's own counter.

It covers matrix products, convolutions and attention, at two operations per multiply-accumulate. Normalisation and
activations, among them all operators of ``esper.ops``, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


class _NoModules(nullcontext[None]):
    """Replaces the counter's module tracker.

    The tracker hooks into the gradients of module inputs, which fails if autograd is asked for the gradient of that
    very tensor, as shadow passes do.
    """

    parents = frozenset({"Global"})


class PassCounter(FlopCounterMode):
    """Counts all operations of a pass, regardless of the module."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModules()  # type: ignore[assignment]


@contextmanager
def counting() -> Iterator[PassCounter]:
    """Counts the operations of a block, the matrix products of attention among them."""
    with PassCounter() as counter, sdpa_kernel(SDPBackend.MATH):
        yield counter
