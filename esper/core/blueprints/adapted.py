"""Frozen linear layers with LoRAs beside their weights, whose rank grows as seeds are merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.core.blend import Seed

RANKS = {"lora_2": 2, "lora_8": 8, "lora_32": 32}
"""Rank of the change that a blueprint makes to a layer's weights."""


class Adapted(nn.Module):
    """(W + B A) x + b with a frozen W and an ``adapter`` of two layers, A and B, that learns.

    A layer becomes one in place, see :func:`adapt`, so that whatever refers to the layer has its adapter. The bases of
    its class are then this one and its former one.
    """

    adapter: nn.Sequential

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (base_class(self),), vars(self)  # pickle finds no class that is made on demand


class AdaptedLinear(Adapted, nn.Linear):
    """A linear layer with an adapter."""


_CLASSES: dict[type[nn.Module], type[Adapted]] = {nn.Linear: AdaptedLinear}
"""Classes of layers with adapters, by that of the layers without."""


def _adapted_class(base: type[nn.Module]) -> type[Adapted]:
    if base not in _CLASSES:
        _CLASSES[base] = type(f"Adapted{base.__name__}", (Adapted, base), {})
    return _CLASSES[base]


def _unpickled(base: type[nn.Module]) -> Adapted:
    kind = _adapted_class(base)
    return kind.__new__(kind)


def base_class(layer: nn.Module) -> type[nn.Module]:
    """Returns the class of ``layer``, or the one that it has without its adapter."""
    kind = type(layer)
    if isinstance(layer, Adapted):
        return kind.__bases__[1]
    return kind


def is_transposed(layer: nn.Module) -> bool:
    """Returns whether a layer is the ``Conv1D`` of Hugging Face's GPT-2: y = x W + b with weights [in, out]."""
    kind = base_class(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def is_plain_matrix(layer: nn.Module) -> bool:
    """Returns whether a layer is an ``nn.Linear`` or a ``Conv1D``, and no class of its own; it may have an adapter."""
    return base_class(layer) is nn.Linear or is_transposed(layer)


def takes_adapter(layer: nn.Module) -> bool:
    """Whether ``layer`` is linear and frozen, without an adapter or with one that learns."""
    if isinstance(layer, Adapted) and not layer.adapter.get_parameter("0.weight").requires_grad:
        return False
    return is_plain_matrix(layer) and not layer.get_parameter("weight").requires_grad


def raises_rank(blueprint: str, layers: Sequence[nn.Module]) -> bool:
    """Whether a seed of ``blueprint`` at ``layers`` is a LoRA of a frozen layer, whose adapter takes it up."""
    return blueprint in RANKS and len(layers) == 1 and takes_adapter(layers[0])


def adapter_pairs(layer: nn.Module, seed: Seed) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yields the parameters of the adapter of ``layer`` with those of the first ``seed`` in it."""
    assert isinstance(layer, Adapted)
    return zip(layer.adapter.parameters(), seed.body.parameters(), strict=True)


def rank_of(layer: nn.Module) -> int:
    """Returns the rank of the adapter of ``layer``, 0 without one."""
    if not isinstance(layer, Adapted):
        return 0
    return len(layer.adapter.get_parameter("0.weight"))


@torch.no_grad()
def adapt(layer: nn.Module, rank: int) -> None:
    """Gives a layer without one an adapter of zeros, of this rank; one of rank 0 can take up the first seed."""
    weight = layer.get_parameter("weight")
    width, features = weight.shape
    if is_transposed(layer):
        features, width = weight.shape
    down = nn.Linear(1, 1, bias=False)
    up = nn.Linear(1, 1, bias=False)
    for part, outputs, inputs in ((down, rank, features), (up, width, rank)):
        part.out_features = outputs
        part.in_features = inputs
        part.weight = nn.Parameter(weight.new_zeros(outputs, inputs))
    layer.__class__ = _adapted_class(type(layer))  # as torch's parametrizations do
    layer.adapter = nn.Sequential(down, up).train(layer.training)


@torch.no_grad()
def drop_adapter(layer: Adapted, merge: bool = False) -> None:
    """Makes ``layer`` an ordinary one again; with ``merge``, of the weights W + B A."""
    down, up = (part.get_parameter("weight") for part in layer.adapter)
    if merge:
        change = up.double() @ down.double()
        if is_transposed(layer):
            change = change.T
        weight = layer.get_parameter("weight")
        weight.copy_(weight.double() + change)
    del layer.adapter
    layer.__class__ = base_class(layer)  # type: ignore[assignment]


def merge_adapters(network: nn.Module) -> None:
    """Makes the adapters of ``network`` a part of the weights of their layers."""
    for layer in list(network.modules()):
        if isinstance(layer, Adapted):
            drop_adapter(layer, merge=True)


def take_adapters(network: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Gives the layers of ``network`` adapters of the rank in ``shapes``, of its tensors by name, and the others none.

    Layers that are not in ``shapes`` stay as they are. Returns whether any layer has got or lost one.
    """
    changed = False
    for path, layer in list(network.named_modules()):
        prefix = f"{path}." if path else ""
        if not is_plain_matrix(layer):
            continue
        shape = shapes.get(f"{prefix}adapter.0.weight")
        if shape is not None and not isinstance(layer, Adapted):
            adapt(layer, shape[0])
            changed = True
        elif shape is None and f"{prefix}weight" in shapes and isinstance(layer, Adapted):
            drop_adapter(layer)
            changed = True
    return changed
