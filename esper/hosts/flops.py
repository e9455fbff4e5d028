"""Counts of floating-point operations, by PyTorch's own counter.

It covers matrix products, convolutions and attention, at two operations per multiply-accumulate. Normalisation and
activations, among them all operators of ``esper.ops``, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import unwrap
from types import MethodType
from typing import Any, Self

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


class _NoModules(nullcontext[None]):
    """Replaces the counter's module tracker.

    The tracker hooks into the gradients of module inputs, which fails if autograd is asked for the gradient of that
    very tensor, as shadow passes do.
    """

    parents = frozenset({"Global"})


class PassCounter(FlopCounterMode):
    """Counts all operations of a pass, regardless of the module.

    It calls the counter without the decorator that hides it from ``torch.compile``. At its first call the decorator
    imports the compiler: a second and 70 MB of every process.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModules()  # type: ignore[assignment]

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        mode: Any = self.mode
        count = unwrap(type(mode).__torch_dispatch__)
        mode.__torch_dispatch__ = MethodType(count, mode)
        return self

    def __exit__(self, *args: object) -> None:
        mode: Any = self.mode
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        del mode.__torch_dispatch__  # which refers to the mode


@contextmanager
def counting() -> Iterator[PassCounter]:
    """Counts the operations of a block, the matrix products of attention among them."""
    with PassCounter() as counter, sdpa_kernel(SDPBackend.MATH):
        yield counter
