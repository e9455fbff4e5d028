"""Seeds that read a source become a part of their host's layers: more units, or other weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.hosts.grown import GrownHost
from esper.seeds.blend import Seed
from esper.seeds.blueprints.source import INSTANCE_NORMS, NAMES, Extensible, inputs_of, width_of
from esper.seeds.place import Place


def merge_sources(network: GrownHost, difference: Callable[[], str | None]) -> dict[str, str]:
    """Merges the seeds of ``network`` that read a source into its layers, which changes the layers in place.

    A widening becomes more units of its layers, with the last weights times alpha; a LoRA becomes W + alpha · B A. The
    weights between the new units of two widenings in a row are there, and zero. ``difference`` says how the network's
    outputs differ from those before; a seed that changes them is left as it was.

    Returns the reason for each seed with a source that stays, by slot.
    """
    reasons: dict[str, str] = {}
    for place in network.sites:
        if place.has_source and place.name in network.seeds:
            reason = _obstacle(network, place) or _merge_or_undo(network, place, difference)
            if reason:
                reasons[place.name] = reason
    return reasons


def _obstacle(network: GrownHost, place: Place) -> str | None:
    """Returns the reason why the seed at ``place`` cannot become a part of its layers; None if it can."""
    blueprint = network.kept[place.name].blueprint
    if place.obstacle:
        return place.obstacle
    if blueprint not in NAMES:
        return f"what {blueprint} computes is not known"
    uses = Counter(id(p) for _, p in network.host.named_parameters(remove_duplicate=False))
    if any(uses[id(p)] > 1 for layer in place.layers for p in layer.parameters()):
        return "another layer uses the same weights"
    inside = _residual_inside(network, place) if len(place.layers) > 1 else None
    return None if inside is None else f"the kept seed in {inside} changes the units between its layers"


def _residual_inside(network: GrownHost, place: Place) -> str | None:
    """Returns a slot whose kept seed reads and changes the features between the layers of ``place``."""
    others = [site for site in network.sites if site.name in network.seeds and not site.has_source]
    return next((other.name for other in others if network.host.lies_inside(other.name, place.name)), None)


def _merge_or_undo(network: GrownHost, place: Place, difference: Callable[[], str | None]) -> str | None:
    """Merges a seed and removes it; returns why that was undone, None if the outputs stay the same."""
    seed, kept = network.seeds[place.name], network.kept[place.name]
    assert isinstance(seed, Seed)
    modules = [*_all(place.layers), *network.seeds.modules()]
    before = [(module, dict(vars(module)), dict(module._parameters), dict(module._buffers)) for module in modules]
    units = merge(place.layers, seed.body, kept.alpha)
    del network.seeds[place.name], network.kept[place.name]
    for other in network.sites:
        if units and other.has_source and other.name in network.seeds:
            _fit(other, network.seeds[other.name].get_submodule("body"), place, units)
    found = difference()
    if found is None:
        return None
    network.seeds[place.name], network.kept[place.name] = seed, kept
    for module, attributes, parameters, buffers in before:
        vars(module).update(attributes)
        module._parameters.clear()
        module._parameters.update(parameters)
        module._buffers.clear()
        module._buffers.update(buffers)
    return f"something else uses the units of its layers: merged, {found}"


@torch.no_grad()
def _fit(other: Place, body: nn.Module, widened: Place, units: int) -> None:
    """Gives the seed at ``other`` inputs or outputs of weight zero for the ``units`` that ``widened`` has got."""
    if not other.layers or isinstance(other.layers[0], Extensible):
        return
    if other.layers[0] is widened.layers[-1]:  # it reads them
        first = next(body.children())
        weight = first.get_parameter("weight")
        more = units * (inputs_of(widened.layers[-1]) // width_of(widened.layers[0]))
        zeros = weight.new_zeros(weight.shape[0], more, *weight.shape[2:])
        _replace(first, "weight", torch.cat([weight, zeros], dim=1))
        _set_width(first, ("in_features", "in_channels"), weight.shape[1] + more)
    if other.layers[-1] is widened.layers[0]:  # it adds to them
        *_, last = body.children()
        weight = last.get_parameter("weight")
        _replace(last, "weight", torch.cat([weight, weight.new_zeros(units, *weight.shape[1:])]))
        _set_width(last, ("out_features", "out_channels"), weight.shape[0] + units)


def _all(layers: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for layer in layers for module in layer.modules()]


@torch.no_grad()
def merge(layers: Sequence[nn.Module], body: nn.Module, alpha: float) -> int:
    """Makes ``body``, a widening or a LoRA of ``layers``, a part of them, times ``alpha``.

    Returns the number of units that lie between the layers now and did not before.
    """
    first, *between = layers
    if isinstance(first, Extensible):
        first.absorb(body, alpha)
        return 0
    if not between:
        down, up = (layer.get_parameter("weight").double().flatten(1) for layer in body.children())
        weight = first.get_parameter("weight")
        _replace(first, "weight", weight.double() + alpha * (up @ down).view(weight.shape))
        return 0
    *middle, last = between
    new_first, *new_middle, new_last = body.children()
    old, units = width_of(first), width_of(new_first)
    _append(first, new_first, ("weight", "bias"))
    _set_width(first, ("out_features", "out_channels"), old + units)
    for layer, more in zip(middle, new_middle, strict=True):
        if isinstance(layer, (_BatchNorm, *INSTANCE_NORMS)):
            _append(layer, more, ("weight", "bias", "running_mean", "running_var"))
            layer.num_features = old + units
    columns = alpha * new_last.get_parameter("weight").double()
    _replace(last, "weight", torch.cat([last.get_parameter("weight").double(), columns], dim=1))
    _set_width(last, ("in_features", "in_channels"), inputs_of(last) + columns.shape[1])
    return units


def _append(layer: nn.Module, more: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        own, new = getattr(layer, name), getattr(more, name)
        if own is not None and new is not None:
            _replace(layer, name, torch.cat([own, new.to(own.dtype)]))


def _replace(layer: nn.Module, name: str, value: Tensor) -> None:
    """Replaces a parameter or buffer by ``value``, in the dtype that it has."""
    old = getattr(layer, name)
    made = value.to(old.dtype)
    if isinstance(old, nn.Parameter):
        layer._parameters[name] = nn.Parameter(made, requires_grad=old.requires_grad)
    else:
        layer._buffers[name] = made


def _set_width(layer: nn.Module, names: Sequence[str], width: int) -> None:
    for name in names:
        if hasattr(layer, name):
            setattr(layer, name, width)
