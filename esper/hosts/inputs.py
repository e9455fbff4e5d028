"""Inputs of networks that take several tensors, such as tokens and their mask, and the tensors in their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.config import ConfigError


class Arguments:
    """Several tensors that a model takes together, with the samples first in each.

    Data and training treat them as one tensor of inputs [B, ...]: rows are selected, split, moved and copied in all of
    them at once.

    Args:
        values: tensors by the names of the model's arguments, or in the order of its positional ones.

    Raises ConfigError without inputs, or unless they are tensors with equal numbers of samples.
    """

    def __init__(self, values: Mapping[str, Tensor] | tuple[Tensor, ...]) -> None:
        if isinstance(values, Mapping):
            values = dict(values)
        self.values: dict[str, Tensor] | tuple[Tensor, ...] = values
        if not self.tensors or not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in self.tensors):
            raise ConfigError("inputs are a tensor [N, ...], or a dict or tuple of such tensors")
        if len(set(map(len, self.tensors))) > 1:
            raise ConfigError(f"inputs have different numbers of samples: {form_of(self)}")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in their order."""
        if isinstance(self.values, dict):
            return tuple(self.values.values())
        return self.values

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def each(self, change: Callable[..., Tensor], *others: Arguments) -> Arguments:
        """Calls ``change`` on each tensor and those of ``others`` in its place."""
        rest = [other.tensors for other in others]
        changed = [change(*aligned) for aligned in zip(self.tensors, *rest, strict=True)]
        if isinstance(self.values, dict):
            return Arguments(dict(zip(self.values, changed, strict=True)))
        return Arguments(tuple(changed))

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: slice | Tensor) -> Arguments:
        return self.each(lambda tensor: tensor[rows])

    def clone(self) -> Arguments:
        return self.each(torch.clone)

    def to(self, device: torch.device, non_blocking: bool = False) -> Arguments:
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def cpu(self) -> Arguments:
        return self.each(Tensor.cpu)

    def pin_memory(self) -> Arguments:
        return self.each(Tensor.pin_memory)

    def tensor_split(self, parts: int) -> tuple[Arguments, ...]:
        """Splits the samples as ``Tensor.tensor_split`` does."""
        return tuple(self[rows] for rows in torch.arange(len(self)).tensor_split(parts))


Inputs = Tensor | Arguments
"""Inputs of a network, [B, ...]."""


def as_inputs(x: Any) -> Inputs:
    """Returns a dict or a tuple of tensors as :class:`Arguments`, and anything else as it is."""
    if isinstance(x, Mapping | tuple):
        return Arguments(x)
    return x  # type: ignore[no-any-return]


def gathered(positional: tuple[Any, ...], named: dict[str, Any]) -> Inputs:
    """Returns the arguments of a call as inputs: a single one as it is, or several of one kind.

    Raises ConfigError for both kinds, or none.
    """
    if len(positional) == 1 and not named:
        return as_inputs(positional[0])
    if positional and named:
        raise ConfigError("give inputs all by name, or all by position")
    return Arguments(named or positional)


def tensors_of(x: Inputs) -> tuple[Tensor, ...]:
    if isinstance(x, Arguments):
        return x.tensors
    return (x,)


def stack(rows: Sequence[Any]) -> Inputs:
    """Stacks samples, each a tensor or a dict or tuple of them, into inputs [len(rows), ...]."""
    first = rows[0]
    if isinstance(first, Tensor):
        return torch.stack(list(rows))

    def stacked(key: Any) -> Tensor:
        return torch.stack([torch.as_tensor(row[key]) for row in rows])

    if isinstance(first, Mapping):
        return Arguments({name: stacked(name) for name in first})
    return Arguments(tuple(map(stacked, range(len(first)))))


def empty_like(x: Inputs, count: int) -> Inputs:
    """Allocates uninitialised memory for ``count`` samples like those of ``x``."""
    if isinstance(x, Arguments):
        return x.each(lambda tensor: tensor.new_empty((count, *tensor.shape[1:])))
    return x.new_empty((count, *x.shape[1:]))


def select_rows(x: Inputs, rows: Tensor, out: Inputs) -> None:
    """Copies the samples ``rows`` int64 [B] of ``x`` into ``out`` [B, ...]."""
    for source, target in zip(tensors_of(x), tensors_of(out), strict=True):
        torch.index_select(source, 0, rows, out=target)


def form_of(x: Inputs, of_sample: bool = False) -> str:
    """Describes dtypes and shapes in words, without the number of samples if ``of_sample``."""
    if isinstance(x, Arguments):
        names = x.values if isinstance(x.values, dict) else range(len(x.tensors))
        forms = [f"{name} {form_of(tensor, of_sample)}" for name, tensor in zip(names, x.tensors, strict=True)]
        return ", ".join(forms)
    shape = tuple(x.shape)
    if of_sample:
        shape = shape[1:]
    return f"{x.dtype} of shape {shape}"


def call(model: nn.Module, x: Inputs) -> Any:
    """Calls ``model`` with the inputs as its arguments."""
    if not isinstance(x, Arguments):
        return model(x)
    if isinstance(x.values, dict):
        return model(**x.values)
    return model(*x.values)


def features_of(output: object) -> object:
    """Returns a submodule's output, or the first element of a tuple, such as that of an ``nn.GRU``."""
    if isinstance(output, tuple) and output:
        return output[0]
    return output


def source_of(inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """Returns the first tensor of a submodule's inputs. Raises TypeError if no input is a tensor."""
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
