"""Blueprints made of the host's own layers: more units inside a layer, low-rank changes of its weights, more blocks.

Widenings and LoRAs are for places with a source. Their last factor is zero at birth, so that a new seed changes no bit
of what its host computes, at any alpha. The others are drawn as the host's own layers are.

A widening of the layers from a source s to a sink h, such as linear, activation, linear, is V act(U s) with k units:
the host with the seed computes what it would with k more hidden units. Attention grows by heads, and its output is what
it would be with more of them. A LoRA is W + alpha · B A, as in Hu et al. 2021, https://arxiv.org/abs/2106.09685.

Places behind blocks that return features of the shape that they read can be made deeper. Copies begin with the weights
of trained blocks, and with what the optimizer knows of them: stacking, as in Gong et al. 2019, "Efficient Training of
BERT by Progressively Stacking". A new block that returns its input changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from esper.core.blueprints.adapted import RANKS, is_plain_matrix, is_transposed, rank_of
from esper.core.blueprints.elementwise import bare_copy, is_elementwise
from esper.core.blueprints.registry import Blueprint, BlueprintRegistry, Factory
from esper.core.place import Place
from esper.ops.norm_relu_pool import NormReluPool


class Applied(nn.Module):
    """A function of torch as a layer, such as a ReLU that a forward method applies."""

    def __init__(self, function: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.options = dict(options)

    def forward(self, h: Tensor) -> Tensor:
        return getattr(F, self.function)(h, **self.options)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return ", ".join([self.function, *options])


Obstacle = Callable[[Place], str | None]
"""Returns the reason why a place cannot have a seed; None if it can."""

Blocks = Callable[[Place], Sequence[nn.Module]]
"""Chooses blocks of the host that lie before a place."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

PER_CHANNEL = (
    Applied,
    nn.Identity,
    _BatchNorm,
    *INSTANCE_NORMS,
    NormReluPool,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
"""Layers between two others in which each channel depends on itself only, so that more of them change no other.
Activations are such as well, see :func:`is_elementwise`."""

SHARES = {
    "widen_quarter": 0.25,
    "widen_half": 0.5,
    "widen_whole": 1.0,
    "widen_x4": 3.0,
    "widen_x8": 7.0,
    "widen_x16": 15.0,
}
"""Share of a layer's units by which a blueprint widens it."""

LARGEST_OFFERED = 1.0
"""Share of the largest widening that is offered without being named: larger ones decide a host's size in one step."""

MERGED = (*SHARES, *RANKS)
"""Blueprints whose seeds ``esper.hosts.widen.merge`` makes a part of their layers."""

FAST = 8
"""Vector width of fused operators: layers whose width is a multiple of it grow by multiples of it."""


class Extensible(nn.Module):
    """A layer that says itself how it grows by units of its kind, such as attention by heads."""

    @property
    def units(self) -> int:
        """Number of units that it has."""
        raise NotImplementedError

    def more(self, units: int) -> nn.Module:
        """Makes ``units`` more: a module from the layer's input to a change of its output, whose layer ``project`` is
        the last one."""
        raise NotImplementedError

    def absorb(self, more: nn.Module, alpha: float) -> None:
        """Takes over the units of ``more``, whose output counts ``alpha`` times."""
        raise NotImplementedError


class Shrinkable(Extensible):
    """A layer that can also give up the units that it has got last."""

    def fit(self, layer: nn.Module, last: nn.Module, units: int) -> None:
        """Gives ``last``, the last layer of a seed that adds to the output of a ``layer`` in here, outputs of weight
        zero for the last ``units``."""
        raise NotImplementedError

    def release(self, units: int) -> dict[str, Tensor]:
        """Takes the last ``units`` out; returns the state of what :meth:`more` makes that computes their output."""
        raise NotImplementedError


def widening_obstacle(layers: Sequence[nn.Module]) -> str | None:
    """Returns the reason why ``layers``, from a source to a sink, cannot be widened; None if they can."""
    if len(layers) == 1 and isinstance(layers[0], Extensible):
        return None
    if len(layers) < 2:
        return "a widening needs two layers, with the units between them"
    first, *between, last = layers
    reason = _not_linear(first) or _not_linear(last)
    if reason is not None:
        return reason
    for layer in between:
        flattens = isinstance(layer, nn.Flatten) and layer.start_dim == 1
        if not flattens and not isinstance(layer, PER_CHANNEL) and not is_elementwise(layer):
            return f"between the layers is a {type(layer).__name__}, in which units depend on each other"
    if inputs_of(last) % width_of(first):
        return f"the last layer reads {inputs_of(last)} features, which is no multiple of the {width_of(first)} units"
    return None


def _not_linear(layer: nn.Module) -> str | None:
    """Returns the reason why ``layer`` is no ordinary linear layer or convolution; None if it is one."""
    if not is_plain_matrix(layer) and type(layer) not in CONVOLUTIONS:
        return f"a {type(layer).__name__} is neither a linear layer nor a convolution"
    if isinstance(layer, CONVOLUTIONS) and layer.groups > 1:
        return "a convolution has groups"
    if not isinstance(layer._parameters.get("weight"), nn.Parameter):
        return "the weights of a layer are computed from others, such as those of weight_norm"
    return None


def width_of(layer: nn.Module) -> int:
    """Returns the number of units of a layer, or of channels that a convolution computes."""
    if isinstance(layer, nn.Linear):  # first, because to ask for a protocol takes a hundred times as long
        return layer.out_features
    if isinstance(layer, Extensible):
        return layer.units
    if is_transposed(layer):
        return int(layer.get_parameter("weight").shape[1])
    width = layer.out_channels
    assert isinstance(width, int)
    return width


def width_at(place: Place) -> int:
    """Returns the number of units that a widening at ``place`` adds to; of a place without one, its channels."""
    if place.has_source and place.layers and widening_obstacle(place.layers) is None:
        return width_of(place.layers[0])
    return place.channels


def inputs_of(layer: nn.Module) -> int:
    """Returns the number of features that a linear layer reads, or of channels that a convolution reads."""
    if is_transposed(layer):
        return int(layer.get_parameter("weight").shape[0])
    width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    assert isinstance(width, int)
    return width


def is_matrix(layer: nn.Module) -> bool:
    """Returns whether a layer is linear in the last dimension of its input."""
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def units_of(share: float, layer: nn.Module) -> int:
    """Returns the number of units by which ``layer`` grows: about ``share`` of its own, at least one, and a multiple of
    8 channels or linear units if their number is one."""
    width = width_of(layer)
    step = 1
    if width % FAST == 0 and not isinstance(layer, Extensible):
        step = FAST
    return max(1, round(share * width / step)) * step


def units_with(blueprint: str, place: Place) -> int | None:
    """Returns the number of units of the layer at ``place`` with a seed of ``blueprint``; None if it does not widen."""
    if blueprint not in SHARES or not place.layers:
        return None
    return width_at(place) + units_of(SHARES[blueprint], place.layers[0])


def widened(place: Place, share: float) -> nn.Module:
    """Makes the layers of ``place`` with new units in place of its own."""
    first, *others = place.layers
    units = units_of(share, first)
    if isinstance(first, Extensible):
        more = first.more(units)
        last = more.get_submodule("project")
        assert isinstance(last, nn.Linear)
        last.register_parameter("bias", None)  # the layer's own is enough
        return _zero_at_birth(more, last, place)
    *between, last = others
    layers = nn.Sequential(_resized(first, inputs_of(first), units, first.bias is not None))
    for layer in between:
        layers.append(_with_channels(layer, units))
    last = _resized(last, inputs_of(last) // width_of(first) * units, width_of(last), bias=False)
    layers.append(last)
    return _zero_at_birth(layers, last, place)


def low_rank(place: Place, rank: int) -> nn.Module:
    """Makes B A: the layer of ``place`` down to ``rank``, and a layer without bias back to its width."""
    (layer,) = place.layers
    down = _resized(layer, inputs_of(layer), rank, bias=False)
    width = width_of(layer)
    if is_matrix(layer):
        up: nn.Module = nn.Linear(rank, width, bias=False)
    else:
        up = type(layer)(rank, width, kernel_size=1, bias=False)
    return _zero_at_birth(nn.Sequential(down, up), up, place)


def reader_of(place: Place) -> nn.Module | None:
    """Returns the layer of the host that reads the units which a widening at ``place`` adds to; None if it is not
    known, or nothing there can be widened."""
    if not place.has_source or place.obstacle or widening_obstacle(place.layers) is not None:
        return None
    last = place.layers[-1]
    if isinstance(last, Extensible):
        project = getattr(last, "project", None)
        return project if isinstance(project, nn.Module) else None
    return last


def _zero_at_birth(body: nn.Module, last: nn.Module, place: Place) -> nn.Module:
    """Returns ``body`` with drawn weights, but for those of the layer ``last``, which are zero."""
    if place.draw is not None:
        place.draw(body)
    nn.init.zeros_(last.get_parameter("weight"))
    return body


def _resized(
    layer: nn.Module,
    inputs: int,
    outputs: int,
    bias: bool,
) -> nn.Module:
    """Makes a layer like ``layer`` with other inputs and outputs."""
    if is_matrix(layer):
        return nn.Linear(inputs, outputs, bias=bias)
    make: type[nn.Module] = type(layer)
    return make(
        inputs,
        outputs,
        kernel_size=layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        bias=bias,
        padding_mode=layer.padding_mode,
    )


def _with_channels(layer: nn.Module, channels: int) -> nn.Module:
    """Makes a layer like ``layer``, one of those in ``PER_CHANNEL``, for other channels."""
    if not isinstance(layer, _NormBase):
        return bare_copy(layer)
    options = {}
    if isinstance(layer, NormReluPool):
        options["pool"] = layer.pool
    kind: type[nn.Module] = type(layer)
    return kind(
        channels,
        layer.eps,
        layer.momentum,
        layer.affine,
        layer.track_running_stats,
        **options,
    )


def _size_of_widening(place: Place, share: float) -> int:
    """Returns the number of parameters of what :func:`widened` makes."""
    first, *others = place.layers
    units = units_of(share, first)
    if isinstance(first, Extensible):
        with torch.device("meta"):  # takes no memory
            return _parameters_of(widened(place, share))
    *between, last = others
    of_units = last.get_parameter("weight").numel()
    for layer in (first, *between):
        # Seeds of a network may lie inside its layers.
        of_units += sum(parameter.numel() for parameter in layer.parameters(recurse=False))
    return of_units // width_of(first) * units


def _size_of_low_rank(place: Place, rank: int) -> int:
    """Returns the number of parameters of what :func:`low_rank` makes."""
    (layer,) = place.layers
    weight = layer.get_parameter("weight")
    width = width_of(layer)
    return (weight.numel() // width + width) * rank


def _parameters_of(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def _obstacle_to_widening(place: Place) -> str | None:
    return place.obstacle or widening_obstacle(place.layers)


def _too_small_for_share(place: Place, share: float) -> str | None:
    first = place.layers[0]
    units = units_of(share, first)
    for name, larger in reversed(SHARES.items()):
        if larger > share and units_of(larger, first) == units:
            return f"it is {name} here: {units} more units"
    return None


def _obstacle_to_low_rank(place: Place) -> str | None:
    if place.obstacle:
        return place.obstacle
    if len(place.layers) != 1:
        return "a LoRA changes the weights of one layer"
    return _not_linear(place.layers[0])


def _too_small_for_rank(place: Place, rank: int) -> str | None:
    layer = place.layers[0]
    if rank + rank_of(layer) < min(width_of(layer), inputs_of(layer)):
        return None
    return f"rank {rank} is no less than that of the layer itself"


def register_in(registry: BlueprintRegistry) -> None:
    """Adds the blueprints of this module, after the others: those for places with a source to every topology."""
    recipes: dict[str, tuple[str, Factory, Callable[[Place], int], Obstacle, Obstacle]] = {}
    for name, share in SHARES.items():
        words = f"{share:.0%} more units inside a layer, to a multiple of {FAST} if it has one; zero at birth"
        too_small: Obstacle = partial(_too_small_for_share, share=share)
        widening = partial(_size_of_widening, share=share)
        recipes[name] = words, partial(widened, share=share), widening, _obstacle_to_widening, too_small
    for name, rank in RANKS.items():
        words = f"W + B A for the weights W of a layer, B A of rank {rank}; zero at birth"
        too_small = partial(_too_small_for_rank, rank=rank)
        factors = partial(_size_of_low_rank, rank=rank)
        recipes[name] = words, partial(low_rank, rank=rank), factors, _obstacle_to_low_rank, too_small
    for topology in registry.topologies():
        for name, (words, make, size, obstacle, too_small) in recipes.items():
            blueprint = Blueprint(
                topology,
                name,
                words,
                make,
                size,
                reads_source=True,
                zero_at_birth=True,
                obstacle=obstacle,
                too_small=too_small,
                if_named=SHARES.get(name, 0) > LARGEST_OFFERED,
                family="widening" if name in SHARES else "",
            )
            registry.add(blueprint)
    _register_deeper(registry)


class Deeper(nn.Module):
    """The change of features h [...] that ``blocks`` make: blocks(h) − h."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, h: Tensor) -> Tensor:
        return self.blocks(h) - h  # type: ignore[no-any-return]


@runtime_checkable
class Renewable(Protocol):
    """A block of a host that can be made anew."""

    def empty(self) -> nn.Module:
        """Makes a new block like this one that returns its input."""


def copied(place: Place, blocks: Blocks) -> nn.Module:
    """Makes a copy of these blocks of the host."""
    return Deeper(list(map(copy.deepcopy, blocks(place))))


def _last_block(place: Place) -> Sequence[nn.Module]:
    return place.group[-1:]


def emptied(place: Place) -> nn.Module:
    """Makes a new block that returns its input."""
    (block,) = _last_block(place)
    assert isinstance(block, Renewable)
    return Deeper([block.empty()])


def _size_of(place: Place, blocks: Blocks) -> int:
    return sum(map(_parameters_of, blocks(place)))


def _obstacle_to_copy(place: Place, blocks: Blocks) -> str | None:
    if blocks(place):
        return None
    return "there are no blocks before it that return features like those that they read"


def _obstacle_to_empty(place: Place) -> str | None:
    if any(isinstance(block, Renewable) for block in _last_block(place)):
        return None
    return "there is no block before it that can be made anew"


COPIES: Mapping[str, tuple[str, Blocks]] = {
    "stack": ("a copy of all blocks, behind the last one", attrgetter("stack")),
    "repeat": ("a copy of the blocks between this place and the one before", attrgetter("group")),
}


def _register_deeper(registry: BlueprintRegistry) -> None:
    """Adds blueprints for more blocks to those of transformers."""
    for name, (words, blocks) in COPIES.items():
        blueprint = Blueprint(
            topology="transformer",
            name=name,
            description=words,
            build=partial(copied, blocks=blocks),
            parameters=partial(_size_of, blocks=blocks),
            takes_place=True,
            copies=blocks,
            obstacle=partial(_obstacle_to_copy, blocks=blocks),
        )
        registry.add(blueprint)
    empty = Blueprint(
        topology="transformer",
        name="empty",
        description="a new block that returns its input; zero at birth",
        build=emptied,
        parameters=lambda place: _size_of(place, _last_block),
        takes_place=True,
        zero_at_birth=True,
        obstacle=_obstacle_to_empty,
    )
    registry.add(empty)
