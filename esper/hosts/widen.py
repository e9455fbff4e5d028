"""Kept seeds that read a source become a part of their network's layers: more units, or other weights."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from esper.core.blend import Seed
from esper.core.blueprints.adapted import Adapted, adapt, is_transposed, take_adapters
from esper.core.blueprints.source import MERGED, SHARES, Extensible, Shrinkable, inputs_of, width_of
from esper.core.place import Place
from esper.hosts import seed_hook
from esper.hosts.between import Between, place_of
from esper.hosts.host import Host
from esper.hosts.layout import Layout

if TYPE_CHECKING:
    from esper.hosts.grown import GrownHost

INPUTS = ("in_features", "in_channels", "nx")
"""Attributes in which layers note the width of their inputs; ``nx`` is that of Hugging Face's ``Conv1D``."""

OUTPUTS = ("out_features", "out_channels", "nf")
"""Attributes in which layers note the width of their outputs."""

NOTHING: Mapping[str, str] = MappingProxyType({})


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
    inside: tuple[Seed, ...]
    """Residual seeds that change the units between the layers of the place."""
    remove: Callable[[], None]
    """Takes it out of its network."""
    beside: bool = False
    """Whether a LoRA learns on in the adapter of its layer, whose weights are frozen."""


def seeds_of_host(network: GrownHost) -> list[SourceSeed]:
    """Returns the kept seeds with a source of one of Esper's hosts, in order."""
    seeds = []
    for place in network.sites:
        name = place.name
        if name not in network.seeds or not place.has_source:
            continue

        def remove(name: str) -> None:
            del network.seeds[name]
            del network.kept[name]

        inside = []
        for site in network.sites:
            residual = network.seeds._modules.get(site.name)
            if not isinstance(residual, Seed) or site.has_source:
                continue
            if network.host.lies_inside(site.name, name):
                inside.append(residual)
        kept = network.kept[name]
        seed = SourceSeed(
            name=name,
            place=place,
            blueprint=kept.blueprint,
            body=network.seeds[name].get_submodule("body"),
            alpha=kept.alpha,
            inside=tuple(inside),
            remove=partial(remove, name),
        )
        seeds.append(seed)
    return seeds


def seeds_of_model(model: nn.Module) -> list[SourceSeed]:
    """Returns the seeds with a source of any model, which forward hooks add, in order: the kept ones, and all that a
    Grower has planted."""
    hooks = [hook for _, _, hook in seed_hook.hooks_of(model) if hook.at_site[0] is not None]
    residual = []
    for hook in hooks:
        if hook.frame is None:
            sink = seed_hook.path_of(model, hook).sink
            residual.append((sink, hook.at_site[0]))
    seeds: dict[str, SourceSeed] = {}
    for hook in hooks:
        seed, alpha = hook.at_site
        if hook.frame is None or seed is None:
            continue
        path = str(seed_hook.path_of(model, hook))
        if path in seeds:  # a site may have grown more than once
            path = f"{path} ({hook.name})"
        recipe = seed_hook.recipe_in(model, hook)
        between = Between(tuple(recipe.get("between", ())))
        inside = []
        for sink, residual_seed in residual:
            if sink in between.inner and residual_seed is not None:
                inside.append(residual_seed)
        seeds[path] = SourceSeed(
            name=path,
            place=place_of(model, hook.name, recipe.get("channels", 0), Layout("mlp"), between),
            blueprint=recipe.get("blueprint", ""),
            body=seed.body,
            alpha=alpha,
            inside=tuple(inside),
            remove=partial(seed_hook.detach, model, hook),
        )
    return list(seeds.values())


def merge_sources(
    network: nn.Module,
    seeds: Sequence[SourceSeed],
    difference: Callable[[], str | None] | None,
    stay: Mapping[str, str] = NOTHING,
    note: Callable[[str], None] = lambda _name: None,
) -> dict[str, str]:
    """Merges the ``seeds`` of ``network`` that read a source into its layers, which changes the layers in place.

    A widening becomes more units of its layers, with the last weights times alpha; a LoRA becomes W + alpha · B A. The
    weights between the new units of two widenings in a row are there, and zero. ``difference`` says how the network's
    outputs differ from those before; a seed that changes them is left as it was. Without it, all are merged, and an
    error is raised. ``stay`` has a reason for seeds that are not to be merged, by name. ``note`` is called with the
    name of each seed once it is merged.

    Returns the reason for each seed with a source that stays, by its name.
    """
    reasons: dict[str, str] = {}
    present = list(seeds)
    for seed in seeds:
        others = [other for other in present if other is not seed]
        reason = stay.get(seed.name) or obstacle_of(network, seed)
        if reason is None:
            change = partial(merge_source, seed, others)
            if difference is None:
                change()
            else:
                found = changed_by(network, change, difference)
                reason = found and f"something else uses the units of its layers: merged, {found}"
        if reason:
            reasons[seed.name] = reason
        else:
            present.remove(seed)
            note(seed.name)
    return reasons


def merge_together(
    network: nn.Module,
    seeds: Sequence[SourceSeed],
    difference: Callable[[], str | None],
) -> dict[str, str]:
    """As :func:`merge_sources`, but compares outputs once, with all seeds merged; only if they differ, after each."""
    reasons: dict[str, str] = {}

    def merge_each() -> None:
        reasons.update(merge_sources(network, seeds, None))

    if changed_by(network, merge_each, difference) is None:
        return reasons
    return merge_sources(network, seeds, difference)


def obstacle_of(network: nn.Module, seed: SourceSeed) -> str | None:
    """Returns the reason why a seed cannot become a part of the layers at its place; None if it can."""
    if seed.place.obstacle:
        return seed.place.obstacle
    if seed.blueprint not in MERGED:
        return f"only {', '.join(MERGED)} are merged into layers, not {seed.blueprint or 'another blueprint'}"
    layers = nn.ModuleList(seed.place.layers)
    adapted = any(isinstance(layer, Adapted) for layer in layers.modules())
    if adapted and seed.blueprint in SHARES:
        return "a layer has an adapter beside its weights, which new units would not have"
    if is_shared(network, layers.parameters()):
        return "another layer uses the same weights"
    return None


def is_shared(network: nn.Module, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether several layers of ``network`` use one of these parameters."""
    uses = Counter(parameter for _, parameter in network.named_parameters(remove_duplicate=False))
    return any(uses[parameter] > 1 for parameter in parameters)


def changed_by(
    network: nn.Module,
    change: Callable[[], None],
    difference: Callable[[], str | None],
) -> str | None:
    """Makes a change to the modules of ``network``, and undoes it if it changes outputs.

    ``difference`` says how they differ from those before; returns what it says, or the error by which it ends.
    """
    before = []
    for module in network.modules():
        attributes = dict(vars(module))
        tables = {name: dict(value) for name, value in attributes.items() if isinstance(value, dict)}
        before.append((module, type(module), attributes, tables))
    try:
        change()
        found = difference()
    except Exception as error:  # a user's network may run into anything
        found = f"the network cannot run: {type(error).__name__}: {error}"
    if found is None:
        return None
    for module, kind, attributes, tables in before:
        module.__class__ = kind  # a layer may have got an adapter
        vars(module).clear()
        vars(module).update(attributes)
        for name, content in tables.items():  # parameters, buffers, submodules and hooks
            attributes[name].clear()
            attributes[name].update(content)
    return found


def merge_source(seed: SourceSeed, others: Sequence[SourceSeed]) -> None:
    """Merges a seed and removes it; ``others`` are those that are not merged, and get room for the new units."""
    (first, *_) = seed.place.layers
    draw_pairs(seed)
    heads = width_of(first) if isinstance(first, Extensible) else 0
    units = merge(seed.place.layers, seed.body, seed.alpha, seed.beside)
    seed.remove()
    if isinstance(first, Shrinkable):
        for other in others:
            if other.place.layers and not isinstance(other.place.layers[0], Extensible):
                *_, last = other.body.children()
                first.fit(other.place.layers[-1], last, first.units - heads)
    if units:
        for residual in seed.inside:
            residual.keep_channels()
        for other in others:
            _fit(other.place, other.body, seed.place, units)


@torch.no_grad()
def draw_pairs(seed: SourceSeed) -> None:
    """Draws the weights of new units that have never trained, in pairs that read the same, with opposite outputs.

    Together they add nothing, but all get gradients in the first step, and part in it. An odd unit adds nothing yet.
    Dropout behind them parts them before: then they add noise around zero.
    """
    first, *between = seed.place.layers
    if not between or seed.blueprint not in SHARES or isinstance(first, Extensible):
        return
    *_, last = between
    *readers, adder = seed.body.children()
    columns = rows_of(adder)
    if columns.any():
        return
    units = width_of(readers[0])
    half = units // 2
    for layer in readers:  # layers and norms with entries for each unit
        for name, tensor in chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False)):
            of_units = rows_of(layer) if name == "weight" else tensor
            if of_units.dim():  # a norm also counts its batches
                of_units[half : 2 * half] = of_units[:half]
    of_unit = columns[0].numel() // units
    drawn = _drawn_as(last, (len(columns), half, of_unit), inputs_of(adder), readers[0])
    left = drawn.new_zeros(len(columns), units - 2 * half, of_unit)
    columns.copy_(torch.cat([drawn, -drawn, left], dim=1).view(columns.shape))


def _drawn_as(layer: nn.Module, shape: Sequence[int], more: int, seed: nn.Module) -> Tensor:
    """Draws weights of ``shape`` for a ``layer`` that gets ``more`` inputs: the variance of its weights falls with its
    inputs. The draw depends on the weights of ``seed`` alone."""
    weight = layer.get_parameter("weight")
    inputs = inputs_of(layer)
    deviation = float(weight.float().std(unbiased=False)) * math.sqrt(inputs / (inputs + more))
    key = zlib.crc32(seed.get_parameter("weight").float().cpu().contiguous().numpy().tobytes())
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(key)) * deviation
    return drawn.to(weight)


@torch.no_grad()
def _fit(other: Place, body: nn.Module, widened: Place, units: int) -> None:
    """Gives the seed at ``other`` inputs or outputs of weight zero for the ``units`` that ``widened`` has got.

    A seed that adds nothing yet reads them with weights of the scale of its others.
    """
    if not other.layers or isinstance(other.layers[0], Extensible):
        return
    if other.layers[0] is widened.layers[-1]:  # it reads them
        first = next(body.children())
        weight = first.get_parameter("weight")
        outputs, inputs, *kernel = weight.shape
        more = units * (inputs_of(widened.layers[-1]) // width_of(widened.layers[0]))
        columns = weight.new_zeros(outputs, more, *kernel)
        *_, adder = body.children()
        if not adder.get_parameter("weight").any():
            columns = _drawn_as(first, columns.shape, more, first)
        replace_tensor(first, "weight", torch.cat([weight, columns], dim=1))
        set_width(first, INPUTS, inputs + more)
    if other.layers[-1] is widened.layers[0]:  # it adds to them
        *_, last = body.children()
        weight = last.get_parameter("weight")
        outputs, *shape = weight.shape
        zeros = weight.new_zeros(units, *shape)
        replace_tensor(last, "weight", torch.cat([weight, zeros]))
        set_width(last, OUTPUTS, outputs + units)


@torch.no_grad()
def merge(
    layers: Sequence[nn.Module],
    body: nn.Module,
    alpha: float,
    beside: bool = False,
) -> int:
    """Makes ``body``, a widening or a LoRA of ``layers``, a part of them, times ``alpha``; ``beside``, of an adapter.

    Returns the number of units that lie between the layers now and did not before.
    """
    first, *between = layers
    if isinstance(first, Extensible):
        first.absorb(body, alpha)
        return 0
    rows = rows_of(first)
    if beside:
        _raise_rank(first, body, alpha)
        return 0
    if not between:
        down, up = (layer.get_parameter("weight").double().flatten(1) for layer in body.children())
        change = (up @ down).view(rows.shape)
        replace_rows(first, rows.double() + alpha * change)
        return 0
    *middle, last = between
    new_first, *new_middle, new_last = body.children()
    units = width_of(new_first)
    width = width_of(first) + units
    replace_rows(first, torch.cat([rows, rows_of(new_first).to(rows.dtype)]))
    _append(first, new_first, ("bias",))
    set_width(first, OUTPUTS, width)
    for layer, more in zip(middle, new_middle, strict=True):
        if isinstance(layer, _NormBase):
            _append(layer, more, ("weight", "bias", "running_mean", "running_var"))
            layer.num_features = width
    columns = alpha * new_last.get_parameter("weight").double()
    read = inputs_of(last) + columns.shape[1]
    replace_rows(last, torch.cat([rows_of(last).double(), columns], dim=1))
    set_width(last, INPUTS, read)
    return units


def _raise_rank(layer: nn.Module, body: nn.Module, alpha: float) -> None:
    """Adds a LoRA to the adapter of ``layer``, which gets one if it has none."""
    if not isinstance(layer, Adapted):
        adapt(layer, rank=0)
    assert isinstance(layer, Adapted)
    down, up = layer.adapter
    new_down, new_up = (part.get_parameter("weight") for part in body.children())
    old_down = down.get_parameter("weight")
    old_up = up.get_parameter("weight")
    rows = torch.cat([old_down, new_down.to(old_down)])
    columns = torch.cat([old_up, (alpha * new_up.double()).to(old_up)], dim=1)
    replace_tensor(down, "weight", rows)
    replace_tensor(up, "weight", columns)
    set_width(down, OUTPUTS, len(rows))
    set_width(up, INPUTS, len(rows))


def rows_of(layer: nn.Module) -> Tensor:
    """Returns the weights of a layer with its outputs in the first dimension."""
    weight = layer.get_parameter("weight")
    if is_transposed(layer):
        return weight.T
    return weight


def replace_rows(layer: nn.Module, value: Tensor) -> None:
    if is_transposed(layer):
        value = value.T.contiguous()
    replace_tensor(layer, "weight", value)


def _append(layer: nn.Module, more: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        old = getattr(layer, name)
        new = getattr(more, name)
        if old is not None and new is not None:
            replace_tensor(layer, name, torch.cat([old, new.to(old.dtype)]))


def replace_tensor(layer: nn.Module, name: str, value: Tensor) -> None:
    """Replaces a parameter or buffer by ``value``, in the dtype and the memory format that it has."""
    old = getattr(layer, name)
    value = value.to(old)
    if old.dim() == 4 and not old.is_contiguous():
        value = value.contiguous(memory_format=torch.channels_last)
    if isinstance(old, nn.Parameter):
        layer._parameters[name] = nn.Parameter(value, requires_grad=old.requires_grad)
    else:
        layer._buffers[name] = value


@contextmanager
def same_parameters(network: nn.Module) -> Iterator[set[nn.Parameter]]:
    """Keeps the parameters of ``network`` the same objects while a block replaces them by others.

    They take the values and shapes of the others, and lose their gradients. So whatever holds a parameter, such as an
    optimizer or a list that a loop clips, holds what the network computes with. The value of the block is the set of
    the parameters that have changed, which is filled at its end.
    """
    before = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            before[module, name] = parameter
    changed: set[nn.Parameter] = set()
    yield changed
    for (module, name), parameter in before.items():
        new = module._parameters.get(name)
        if parameter is None or new is None or new is parameter:
            continue
        changed.add(parameter)
        parameter.grad = None
        # A loss that still refers to the parameter keeps its node of the graph alive, with the old shape. torch makes
        # a new node only if the dtype has changed.
        parameter.data = new.data.to(torch.float16 if new.dtype != torch.float16 else torch.float32)
        parameter.data = new.data
        module._parameters[name] = parameter


@torch.no_grad()
def resize(network: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Gives parameters and buffers of ``network`` these shapes, by name; new ones are zero.

    Others stay as they are. A host gets the blocks that are named. Returns whether any has changed.
    """
    changed = False
    if shapes and isinstance(network, Host):
        changed = network.take_blocks(shapes)
    changed |= take_adapters(network, shapes)
    for path, layer in network.named_modules():
        prefix = f"{path}." if path else ""
        for name, old in (*layer._parameters.items(), *layer._buffers.items()):
            shape = shapes.get(prefix + name)
            if old is None or shape is None or old.shape == shape:
                continue
            changed = True
            replace_tensor(layer, name, old.new_zeros(shape))
            if len(shape) == 1:
                set_width(layer, ("num_features",), shape[0])
            else:
                outputs, inputs = rows_of(layer).shape[:2]
                set_width(layer, OUTPUTS, outputs)
                set_width(layer, INPUTS, inputs)
    return changed


def redraw(network: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Gives tensors these shapes, as :func:`resize`, and their layers new weights, as when they were made."""
    before = shapes_of(network)
    if not resize(network, shapes):
        return
    layers = set()
    for name, shape in shapes_of(network).items():
        if shape != before.get(name):
            path, _, _ = name.rpartition(".")
            layers.add(path)
    for path, layer in network.named_modules():
        if path in layers:
            if is_transposed(layer):  # as its class does when it is made
                nn.init.normal_(layer.get_parameter("weight"), std=0.02)
                nn.init.zeros_(layer.get_parameter("bias"))
            else:
                layer.reset_parameters()
            if isinstance(network, Host):
                network.draw(layer)
    for layer in network.modules():
        if isinstance(layer, Adapted):  # as when they were planted
            nn.init.zeros_(layer.adapter.get_parameter("1.weight"))


def shapes_of(network: nn.Module) -> dict[str, torch.Size]:
    """Returns the shapes of the parameters and buffers of ``network``, by name."""
    tensors = chain(network.named_parameters(), network.named_buffers())
    return {name: tensor.shape for name, tensor in tensors}


def set_width(layer: nn.Module, names: Sequence[str], width: int) -> None:
    for name in names:
        if hasattr(layer, name):
            setattr(layer, name, width)
