"""Need: how much of the loss is left that more units, or a higher rank, at a vacant slot could lower.

A widening gives the layer at its sink more inputs. What this layer should change is the negative gradient of the loss
at its output, v. What it can change by its weights is linear in its inputs b. The part of v that is not, in a least
squares fit on one batch that is judged on another, only other inputs could express: this is the expressivity bottleneck
of Verbockhaven et al. 2024, https://arxiv.org/abs/2405.19816. Need is that share of v times the loss.

A LoRA changes the weights of a frozen layer, which its own rank does not yet. There, need is the other share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from esper.config import ConfigError
from esper.core.blueprints.adapted import takes_adapter
from esper.core.blueprints.source import inputs_of, is_matrix, reader_of
from esper.core.place import Place

MAX_INPUTS = 1024
"""Max inputs of a layer that is measured: the fit takes the time of their number cubed."""
MAX_ROWS = 4096
"""Max positions of a batch that a fit reads, evenly spaced."""
Passed = dict[nn.Module, Tensor]
"""A tensor of each layer in a pass."""
RIDGE = 0.01
"""Added to the variances of inputs in a fit, as a share of their mean."""


@dataclass(frozen=True)
class Seen:
    """The measured layers in a pass over a batch."""

    inputs: list[Tensor]
    """Inputs of each layer."""
    gradients: list[Tensor]
    """Gradient of the mean loss at the output of each layer."""
    loss: Tensor
    """Mean loss, []."""

    def at(self, place: int, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Returns what a layer reads at each position, and the gradient at its output there."""
        return rows_of(layer, self.inputs[place]), columns_of(layer, self.gradients[place])


def measured_layer(layer: nn.Module | None) -> bool:
    """Whether need can be measured at a layer: a linear one, or a convolution of at most two dimensions."""
    if layer is None:
        return False
    taps = 1
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        if layer.groups > 1:
            return False
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return False
        taps = layer.weight[0, 0].numel()
    elif not is_matrix(layer):
        return False
    return inputs_of(layer) * taps <= MAX_INPUTS


def measured_at(place: Place) -> nn.Module | None:
    """Returns the layer that tells the need at a place: the one that reads the units there, or a frozen one that can
    have an adapter; None if nothing tells it."""
    layer = reader_of(place)
    if layer is None and _changes_weights(place):
        layer = place.layers[0]
    return layer if measured_layer(layer) else None


def _changes_weights(place: Place) -> bool:
    """Whether what is planted at a place changes the weights of a frozen layer."""
    return not place.obstacle and len(place.layers) == 1 and takes_adapter(place.layers[0])


def need_at(
    place: Place,
    loss: Tensor,
    share: Tensor,
) -> Tensor:
    """Returns the need at a place, in units of the ``loss``; ``share`` is that of :func:`inexpressible`."""
    return loss * (1 - share if _changes_weights(place) else share)


def rows_of(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Returns what each output position of a layer reads of its ``inputs``, [positions, numbers]."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        flat = isinstance(layer, nn.Conv1d)

        def pair(size: Any, of_flat: int) -> Any:
            if flat:
                return (of_flat, *size)
            return size

        patches = functional.unfold(
            inputs.unsqueeze(2) if flat else inputs,
            kernel_size=pair(layer.kernel_size, 1),
            dilation=pair(layer.dilation, 1),
            padding=pair(layer.padding, 0),
            stride=pair(layer.stride, 1),
        )
        return patches.transpose(1, 2).flatten(0, 1)
    return inputs.reshape(-1, inputs_of(layer))


def columns_of(layer: nn.Module, outputs: Tensor) -> Tensor:
    """Returns the ``outputs`` of a layer at each position, [positions, units], in the order of :func:`rows_of`."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        by_position = outputs.flatten(2).transpose(1, 2)
        return by_position.flatten(0, 1)
    return outputs.reshape(-1, outputs.shape[-1])


def inexpressible(
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
) -> Tensor:
    """Returns the share of the wanted change of a layer that its inputs cannot express, a scalar.

    It is 1 − tr(G1ᵀ S⁻¹ G2) / |v|², with G = bᵀ v of each batch, the second moments S of the inputs of both, and the
    mean |v|² of both. What a batch shows by chance is independent in the two, and adds nothing to the product on
    average, so that the share is about 1 where the inputs explain nothing, and may exceed it. NaN where nothing is to
    be changed.

    Args:
        first: inputs [n, d] and gradients at the output [n, units] by position, on one batch.
        second: the same on another batch.
    """
    products = []
    moments_of = []
    squares = []
    for inputs, gradients in (first, second):
        step = -(-len(inputs) // MAX_ROWS)
        b = inputs[::step].double()
        v = gradients[::step].double()
        products.append(b.T @ v / len(b))
        moments_of.append(b.T @ b / len(b))
        squares.append(v.square().sum() / len(v))

    moments = (moments_of[0] + moments_of[1]) / 2
    whole = (squares[0] + squares[1]) / 2
    variances = moments.diagonal()
    # Dead inputs have only zeros, by which nothing can be divided.
    least = torch.finfo(moments.dtype).tiny
    variances.add_(RIDGE * variances.mean() + least)
    fit, _ = torch.linalg.solve_ex(moments, products[1])
    explained = (products[0] * fit).sum()
    share: Tensor = 1 - explained / whole
    return share


@contextmanager
def watched(layers: Iterable[nn.Module]) -> Iterator[tuple[Passed, Passed]]:
    """Yields two dicts that get the inputs and outputs of ``layers`` in a pass; loss gradients reach the outputs."""
    inputs: Passed = {}
    outputs: Passed = {}

    def keep(
        layer: nn.Module,
        args: tuple[Tensor],
        output: Tensor,
    ) -> Tensor:
        inputs[layer] = args[0].detach().clone()  # later layers may work in place
        if torch.is_grad_enabled() and not output.requires_grad:
            output = output.detach().requires_grad_()  # of a frozen network
        outputs[layer] = output
        return output.clone()

    with ExitStack() as hooks:
        for layer in layers:
            handle = layer.register_forward_hook(keep)
            hooks.callback(handle.remove)
        yield inputs, outputs


Loss = Callable[[], Tensor]
"""Computes the mean loss of a batch."""


def needs_at(
    places: Mapping[str, Place],
    first: Loss,
    second: Loss,
) -> dict[str, float]:
    """Returns the need at each of ``places``, by name, in units of the loss; those without one are left out.

    No gradient is stored. Raises ConfigError for a loss that does not depend on the layers there.

    Args:
        places: the places, by name.
        first: computes the mean loss of a batch.
        second: computes that of another batch, without a sample of the first.
    """
    layers = {}
    for name, place in places.items():
        layer = measured_at(place)
        if layer is not None:
            layers[name] = layer
    if not layers:
        return {}
    seen = [_look(layers, loss) for loss in (first, second)]
    loss = (seen[0].loss + seen[1].loss) / 2
    needs = {}
    for number, (name, layer) in enumerate(layers.items()):
        share = inexpressible(
            seen[0].at(number, layer),
            seen[1].at(number, layer),
        )
        needs[name] = float(need_at(places[name], loss, share))
    return needs


def _look(layers: Mapping[str, nn.Module], loss: Loss) -> Seen:
    """Runs a batch and sees what its loss wants of ``layers``."""
    with torch.enable_grad(), watched(layers.values()) as (inputs, outputs):
        measured = loss()
    missing = [name for name, layer in layers.items() if layer not in outputs]
    if missing or not measured.requires_grad:
        raise ConfigError(
            "need is measured by two functions that compute the loss of a batch with the model and gradients; the "
            f"layers at {', '.join(missing) or 'any site'} took no part in one of them"
        )
    gradients = torch.autograd.grad(
        measured,
        [outputs[layer] for layer in layers.values()],
        materialize_grads=True,
    )
    return Seen(
        [inputs[layer] for layer in layers.values()],
        list(gradients),
        measured.detach(),
    )
