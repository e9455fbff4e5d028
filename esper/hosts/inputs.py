"""Inputs of networks: a tensor, or several tensors by argument name or in order, with the samples first in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Inputs = Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]
"""A tensor [B, ...], a dict of them by the name of the model's argument, or a tuple of positional arguments."""


def tensors_of(x: Inputs) -> tuple[Tensor, ...]:
    """Returns the tensors in a fixed order."""
    if isinstance(x, Tensor):
        return (x,)
    return tuple(x.values()) if isinstance(x, Mapping) else x


def map_inputs(change: Callable[..., Tensor], x: Inputs, *others: Inputs) -> Inputs:
    """Calls ``change`` on each tensor, with those in the same place of ``others``, of the same form."""
    if isinstance(x, Tensor):
        return change(x, *others)
    if isinstance(x, Mapping):
        return {name: change(value, *(other[name] for other in others)) for name, value in x.items()}  # type: ignore[call-overload,index]
    return tuple(change(value, *(other[i] for other in others)) for i, value in enumerate(x))  # type: ignore[index]


def samples_in(x: Inputs) -> int:
    """Returns the number of samples."""
    return len(tensors_of(x)[0])


def call(model: nn.Module, x: Inputs) -> Any:
    """Calls ``model`` with the inputs as its arguments."""
    if isinstance(x, Tensor):
        return model(x)
    return model(**x) if isinstance(x, Mapping) else model(*x)
