"""Outputs of modules: the features of a site in a tensor or a tuple, and the logits of a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def features_of(output: object) -> object:
    """Returns what a site holds of a submodule's output: of a tuple, as of an ``nn.GRU``, the first element."""
    if isinstance(output, tuple) and output:
        return output[0]
    return output


def source_of(inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """Returns what a seed reads of a submodule's inputs: the first tensor. Raises TypeError if there is none."""
    for value in (*inputs, *named.values()):
        if isinstance(value, Tensor):
            return value
    raise TypeError("a source is the input of a submodule that is called with a tensor")


def with_features(output: object, h: Tensor) -> Any:
    """Returns the output with its features replaced by ``h``; a named tuple stays one."""
    if not isinstance(output, tuple):
        return h
    if hasattr(output, "_fields"):
        return type(output)(h, *output[1:])
    return (h, *output[1:])


def logits_of(output: object) -> Any:
    """Returns ``logits`` of an object or a dict, as the models of Hugging Face return them; any other output as it is.

    A tuple is not searched: its other elements may be outputs that a loss needs, too.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("logits", output)
    return getattr(output, "logits", output)
