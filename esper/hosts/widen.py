"""Kept seeds become a part of their network's layers: more units, or other weights."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from esper.core.blend import Seed
from esper.core.blueprints.source import MERGED, Extensible, inputs_of, is_transposed, width_of
from esper.core.place import Place
from esper.hosts.between import Between, place_of
from esper.hosts.layout import Layout
from esper.hosts.seed_hook import SeedHook, forget, hooks_of, path_of, recipe_in, register, unregister

if TYPE_CHECKING:
    from esper.hosts.grown import GrownHost


import copy

from esper.core.blend import ChannelScale
from esper.core.ramps import BlendOperator
from esper.hosts.seed_hook import drop_container

INPUTS = ("in_features", "in_channels", "nx")
"""Attributes in which layers note the width of their inputs; ``nx`` is that of Hugging Face's ``Conv1D``."""

OUTPUTS = ("out_features", "out_channels", "nf")
"""Attributes in which layers note the width of their outputs."""


@dataclass(frozen=True)
class SourceSeed:
    """A kept seed that reads a source."""

    name: str
    """The slot in an env, the path of a site of any other network."""
    place: Place
    blueprint: str
    """Name of its blueprint, "" if it is not known."""
    body: nn.Module
    alpha: float
    inside: str | None
    """A residual seed that changes the units between the layers of the place; None if there is none."""


class Mergeable(Protocol):
    """A network with kept seeds."""

    def source_seeds(self) -> list[SourceSeed]:
        """Returns the seeds that read a source, in order."""

    def parameters_of_layers(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of the network without its seeds, each as often as it is used."""

    def remove(self, seed: SourceSeed) -> Callable[[], None]:
        """Removes a seed; returns what puts it back."""


class GrownInHost:
    """The kept seeds of one of Esper's hosts."""

    def __init__(self, network: GrownHost) -> None:
        self.network = network

    def source_seeds(self) -> list[SourceSeed]:
        network = self.network
        places = [place for place in network.sites if place.name in network.seeds]
        residual = [place.name for place in places if not place.has_source]
        seeds = []
        for place in places:
            name = place.name
            if not place.has_source:
                continue
            kept = network.kept[name]
            seed = SourceSeed(
                name=name,
                place=place,
                blueprint=kept.blueprint,
                body=network.seeds[name].get_submodule("body"),
                alpha=kept.alpha,
                inside=next((other for other in residual if network.host.lies_inside(other, name)), None),
            )
            seeds.append(seed)
        return seeds

    def parameters_of_layers(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.network.host.named_parameters(remove_duplicate=False):
            yield parameter

    def remove(self, seed: SourceSeed) -> Callable[[], None]:
        network = self.network
        name = seed.name
        module = network.seeds[name]
        del network.seeds[name]
        kept = network.kept.pop(name)

        def put_back() -> None:
            network.seeds[name] = module
            network.kept[name] = kept

        return put_back


class GrownInModel:
    """The kept seeds of any model, which forward hooks add."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._hooks: dict[str, SeedHook] = {}
        for _, _, hook in hooks_of(model):
            if hook.seed is None:
                continue
            path = str(path_of(model, hook))
            if path in self._hooks:  # a site may have grown more than once
                path = f"{path} ({hook.name})"
            self._hooks[path] = hook

    def source_seeds(self) -> list[SourceSeed]:
        model = self.model
        sinks = [path_of(model, hook).sink for hook in self._hooks.values() if hook.frame is None]
        seeds = []
        for path, hook in self._hooks.items():
            if hook.frame is None or hook.seed is None:
                continue
            recipe = recipe_in(model, hook)
            parts = tuple(recipe.get("between", ()))
            units = {part.get("path") for part in parts[:-1]}
            seed = SourceSeed(
                name=path,
                place=place_of(model, hook.name, recipe.get("channels", 0), Layout("mlp"), Between(parts)),
                blueprint=recipe.get("blueprint", ""),
                body=hook.seed.body,
                alpha=hook.alpha,
                inside=next((sink for sink in sinks if sink in units), None),
            )
            seeds.append(seed)
        return seeds

    def parameters_of_layers(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.model.named_parameters(remove_duplicate=False):
            yield parameter

    def remove(self, seed: SourceSeed) -> Callable[[], None]:
        hook = self._hooks[seed.name]
        path = path_of(self.model, hook)
        module = hook.seed
        assert isinstance(module, Seed)
        containers = forget(self.model, module)
        unregister(self.model, hook)

        def put_back() -> None:
            register(self.model, path, hook)
            for container in containers:
                container.add_module(hook.name, module)

        return put_back


def merge_all(
    network: nn.Module,
    difference: Callable[[], str | None],
    stay: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Merges the kept seeds of ``network`` into its layers, as far as that is possible.

    ``difference`` says how its outputs differ from those before. ``stay`` has a reason for seeds that are not to be
    merged, by path. Returns the reason for each seed that stays.
    """
    reasons = merge_sources(GrownInModel(network), difference, stay)
    reasons.update(merge_seeds(network, difference, stay))
    return reasons


def warn_unmerged(reasons: Mapping[str, str]) -> None:
    """Warns of the seeds that :func:`merge_all` left, by their places, with its reasons."""
    if reasons:
        listed = "; ".join(f"{place}: {reason}" for place, reason in reasons.items())
        warnings.warn(f"these seeds are not merged and stay modules: {listed}", stacklevel=3)


def merge_sources(
    network: Mergeable,
    difference: Callable[[], str | None],
    stay: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Merges the seeds of ``network`` that read a source into its layers, which changes the layers in place.

    A widening becomes more units of its layers, with the last weights times alpha; a LoRA becomes W + alpha · B A. The
    weights between the new units of two widenings in a row are there, and zero. ``difference`` says how the network's
    outputs differ from those before; a seed that changes them is left as it was. ``stay`` has a reason for seeds that
    are not to be merged, by name.

    Returns the reason for each seed with a source that stays, by its name.
    """
    reasons: dict[str, str] = {}
    present = network.source_seeds()
    for seed in list(present):
        others = [other for other in present if other is not seed]
        reason = stay.get(seed.name) or _obstacle(network, seed)
        reason = reason or _merge_or_undo(network, seed, others, difference)
        if reason:
            reasons[seed.name] = reason
        else:
            present.remove(seed)
    return reasons


def _obstacle(network: Mergeable, seed: SourceSeed) -> str | None:
    """Returns the reason why a seed cannot become a part of the layers at its place; None if it can."""
    if seed.place.obstacle:
        return seed.place.obstacle
    if seed.blueprint not in MERGED:
        return f"only {', '.join(MERGED)} are merged into layers, not {seed.blueprint or 'another blueprint'}"
    layers = seed.place.layers
    uses = Counter(map(id, network.parameters_of_layers()))
    for layer in layers:
        if any(uses[id(parameter)] > 1 for parameter in layer.parameters()):
            return "another layer uses the same weights"
    if seed.inside is not None and len(layers) > 1:
        return f"the kept seed in {seed.inside} changes the units between its layers"
    return None


def _merge_or_undo(
    network: Mergeable,
    seed: SourceSeed,
    others: Sequence[SourceSeed],
    difference: Callable[[], str | None],
) -> str | None:
    """Merges a seed and removes it; returns why that was undone, None if the outputs stay the same.

    ``others`` are those that are not merged.
    """
    bodies = [other.body for other in others]
    modules = nn.ModuleList([*seed.place.layers, seed.body, *bodies]).modules()
    before = [(module, dict(vars(module)), dict(module._parameters), dict(module._buffers)) for module in modules]
    units = merge(seed.place.layers, seed.body, seed.alpha)
    put_back = network.remove(seed)
    if units:
        for other in others:
            _fit(other.place, other.body, seed.place, units)
    change = difference()
    if change is None:
        return None
    put_back()
    for module, attributes, parameters, buffers in before:
        vars(module).update(attributes)
        module._parameters.clear()
        module._parameters.update(parameters)
        module._buffers.clear()
        module._buffers.update(buffers)
    return f"something else uses the units of its layers: merged, {change}"


@torch.no_grad()
def _fit(other: Place, body: nn.Module, widened: Place, units: int) -> None:
    """Gives the seed at ``other`` inputs or outputs of weight zero for the ``units`` that ``widened`` has got."""
    if not other.layers or isinstance(other.layers[0], Extensible):
        return
    if other.layers[0] is widened.layers[-1]:  # it reads them
        first = next(body.children())
        weight = first.get_parameter("weight")
        outputs, inputs, *kernel = weight.shape
        more = units * (inputs_of(widened.layers[-1]) // width_of(widened.layers[0]))
        zeros = weight.new_zeros(outputs, more, *kernel)
        _replace(first, "weight", torch.cat([weight, zeros], dim=1))
        _set_width(first, INPUTS, inputs + more)
    if other.layers[-1] is widened.layers[0]:  # it adds to them
        *_, last = body.children()
        weight = last.get_parameter("weight")
        outputs, *shape = weight.shape
        zeros = weight.new_zeros(units, *shape)
        _replace(last, "weight", torch.cat([weight, zeros]))
        _set_width(last, OUTPUTS, outputs + units)


@torch.no_grad()
def merge(layers: Sequence[nn.Module], body: nn.Module, alpha: float) -> int:
    """Makes ``body``, a widening or a LoRA of ``layers``, a part of them, times ``alpha``.

    Returns the number of units that lie between the layers now and did not before.
    """
    first, *between = layers
    if isinstance(first, Extensible):
        first.absorb(body, alpha)
        return 0
    rows = _rows(first)
    if not between:
        down, up = (layer.get_parameter("weight").double().flatten(1) for layer in body.children())
        change = (up @ down).view(rows.shape)
        _replace_rows(first, rows.double() + alpha * change)
        return 0
    *middle, last = between
    new_first, *new_middle, new_last = body.children()
    units = width_of(new_first)
    width = width_of(first) + units
    _replace_rows(first, torch.cat([rows, _rows(new_first).to(rows.dtype)]))
    _append(first, new_first, ("bias",))
    _set_width(first, OUTPUTS, width)
    for layer, more in zip(middle, new_middle, strict=True):
        if isinstance(layer, _NormBase):
            _append(layer, more, ("weight", "bias", "running_mean", "running_var"))
            layer.num_features = width
    columns = alpha * new_last.get_parameter("weight").double()
    read = inputs_of(last) + columns.shape[1]
    _replace_rows(last, torch.cat([_rows(last).double(), columns], dim=1))
    _set_width(last, INPUTS, read)
    return units


def _rows(layer: nn.Module) -> Tensor:
    """Returns the weights of a layer with its outputs in the first dimension."""
    weight = layer.get_parameter("weight")
    if is_transposed(layer):
        return weight.T
    return weight


def _replace_rows(layer: nn.Module, value: Tensor) -> None:
    if is_transposed(layer):
        value = value.T.contiguous()
    _replace(layer, "weight", value)


def _append(layer: nn.Module, more: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        old = getattr(layer, name)
        new = getattr(more, name)
        if old is not None and new is not None:
            _replace(layer, name, torch.cat([old, new.to(old.dtype)]))


def _replace(layer: nn.Module, name: str, value: Tensor) -> None:
    """Replaces a parameter or buffer by ``value``, in the dtype that it has."""
    old = getattr(layer, name)
    value = value.to(old.dtype)
    if isinstance(old, nn.Parameter):
        layer._parameters[name] = nn.Parameter(value, requires_grad=old.requires_grad)
    else:
        layer._buffers[name] = value


def _set_width(layer: nn.Module, names: Sequence[str], width: int) -> None:
    for name in names:
        if hasattr(layer, name):
            setattr(layer, name, width)


def merge_seeds(
    model: nn.Module,
    difference: Callable[[], str | None],
    stay: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Merges the seeds of ``model`` that read their sink into the weights of their linear layers.

    With the seed's map d(h) = M h + c, of features h = W x + b, the merged layer has the weights (I + alpha · M) W and
    the bias (I + alpha · M) b + alpha · c, computed in float64. ``difference`` says how the model's outputs differ from
    those before; a layer that changes them, because something else uses its weights, too, is left as it was.

    Returns the reason for each seed that stays, by path.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    reasons: dict[str, str] = {}
    for path, module, hook in hooks_of(model):
        if hook.seed is None or hook.frame is not None:
            continue
        layer = _last(module)
        reason = stay.get(path) or _not_linear(hook.seed, layer, uses)
        reason = reason or _merge_linear_or_undo(model, module, layer, hook, hook.seed, difference)
        if not reason:
            continue
        if path in reasons:
            reason = f"{reasons[path]}, and {reason}"
        reasons[path] = reason
    drop_container(model)
    return reasons


def _merge_linear_or_undo(
    model: nn.Module,
    module: nn.Module,
    layer: nn.Module,
    hook: SeedHook,
    seed: Seed,
    difference: Callable[[], str | None],
) -> str | None:
    """Merges a seed and removes its hook; returns why it was undone, None if the outputs stay the same."""
    before = dict(layer._parameters)
    values = {name: p.detach().clone() for name, p in before.items() if p is not None}
    hooks = dict(module._forward_hooks)
    _merge_linear(layer, seed, hook.alpha)
    unregister(model, hook)
    change = difference()
    if change is None:
        forget(model, seed)
        return None
    module._forward_hooks.clear()  # their order counts
    module._forward_hooks.update(hooks)
    layer._parameters.update(before)
    for name, value in values.items():
        layer.get_parameter(name).data.copy_(value)
    return f"something else uses the weights of its layer or changes its output: merged, {change}"


def _last(module: nn.Module) -> nn.Module:
    """Returns the layer that computes the output of ``module``: of an ``nn.Sequential``, that of its last one."""
    while type(module) is nn.Sequential and len(module):
        module = module[-1]
    return module


def _not_linear(seed: Seed, layer: nn.Module, uses: Counter[int]) -> str | None:
    """Returns why the seed cannot become a part of the layer's weights; None if it can.

    It can if it is linear in the output of a linear layer whose weights no other layer uses.
    """
    if type(layer) is not nn.Linear and not is_transposed(layer):
        return f"its output comes from a {type(layer).__name__}, not from a linear layer"
    if not isinstance(layer._parameters.get("weight"), nn.Parameter):
        return "the weights of its layer are computed from others, such as those of weight_norm or of pruning"
    if seed.operator is not BlendOperator.ADD:
        return f"its blend style is not additive ({seed.operator.value})"
    for module in seed.body.modules():
        kind = type(module)
        if kind not in (nn.Linear, ChannelScale, nn.Identity, nn.Sequential):
            return f"{kind.__name__} is not linear"
    if any(uses[id(p)] > 1 for p in layer.parameters(recurse=False)):
        return "another layer uses the same weights"
    return None


@torch.no_grad()
def _merge_linear(layer: nn.Module, seed: Seed, alpha: float) -> None:
    weight = layer.get_parameter("weight")
    bias = getattr(layer, "bias", None)
    rows = weight.double().cpu()
    if not is_transposed(layer):
        rows = rows.T  # [in, out]
    body = copy.deepcopy(seed.body).to("cpu", torch.float64)
    channels = rows.shape[1]
    constant = body(torch.zeros(1, channels, dtype=torch.float64))  # [1, out]
    matrix = body(torch.eye(channels, dtype=torch.float64)) - constant  # row i is the delta of unit i
    merged = rows + alpha * rows @ matrix
    if not is_transposed(layer):
        merged = merged.T
    weight.copy_(merged)
    if bias is not None:
        old = bias.double().cpu()
        new = old + alpha * (old @ matrix + constant[0])
        bias.copy_(new.to(bias.dtype))
    elif bool(constant.any()):
        new = alpha * constant[0]
        layer.bias = nn.Parameter(new.to(weight))
