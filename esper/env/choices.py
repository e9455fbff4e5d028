"""Descriptions of blueprints before they are planted, for controllers and masks: their sizes, costs and parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from esper.config import ConfigError
from esper.env.state import Choices
from esper.hosts.flops import counting
from esper.hosts.host import features_at, row_major
from esper.lifecycle.slots import Bools, Floats, Ints
from esper.seeds.blend import gate_parameters
from esper.seeds.blueprints import Blueprint, BlueprintRegistry, choose
from esper.seeds.features import Features
from esper.seeds.place import Place
from esper.spaces.action import ActionSpec
from esper.training.rng import seeded

if TYPE_CHECKING:
    from esper.training.host_training import HostTraining


def spec_of(
    topology: str,
    places: Sequence[Place],
    blueprints: BlueprintRegistry,
    wanted: tuple[str, ...] | None,
) -> ActionSpec:
    """Returns the slots of ``places`` with the blueprints that may be planted in them: ``wanted``, or all that fit.

    Raises ConfigError for an unknown blueprint, and for a place in which none fits.
    """
    check_places(topology, places, blueprints)
    slots = row_major(place.name for place in places)
    kinds = dict.fromkeys(place.topology or topology for place in places)
    names = choose(
        wanted,
        blueprints.names(topology, places),
        f"{', '.join(kinds)} hosts",
        partial(blueprints.misfit, topology, places),
    )
    return ActionSpec(slots, names, offered(topology, places, names, blueprints))


def choices_of(
    training: HostTraining,
    spec: ActionSpec,
    blueprints: BlueprintRegistry,
) -> Choices:
    """Returns what is known of a host in training and of the seeds that could be planted in it.

    Raises ConfigError for a blueprint that cannot be built, or whose ``parameters`` raises.
    """
    host = training.host
    topology = host.topology
    places = host.sites
    # One pass shows the operations of the host and the features at every place.
    with seeded(0), counting() as counter:
        features = features_at(host, training.sample)
    return Choices(
        host_parameters=host.parameter_count,
        host_flops=counter.get_total_flops() / len(training.sample),
        parameters=largest_sizes(topology, places, spec, blueprints),
        flops=flops_of_seeds(topology, places, spec, blueprints, features),
        kinds=kinds_of(
            topology,
            places,
            spec,
            blueprints,
            training.config.env.at_once,
        ),
    )


def joining(
    topology: str,
    places: Sequence[Place],
    spec: ActionSpec,
    blueprints: BlueprintRegistry,
) -> Bools:
    """Returns which blueprints' seeds may be a part of their host at once, [B]."""
    return _any_recipe(
        topology,
        places,
        spec,
        blueprints,
        lambda recipe: recipe.at_once,
    )


def only_added(
    topology: str,
    places: Sequence[Place],
    spec: ActionSpec,
    blueprints: BlueprintRegistry,
) -> Bools:
    """Returns which blueprints' seeds are added to features whatever the blend style, [B]."""
    return _any_recipe(
        topology,
        places,
        spec,
        blueprints,
        lambda recipe: recipe.only_added,
    )


def _any_recipe(
    topology: str,
    places: Sequence[Place],
    spec: ActionSpec,
    blueprints: BlueprintRegistry,
    question: Callable[[Blueprint], bool],
) -> Bools:
    """Returns which blueprints have, at one of the places, a recipe of which ``question`` is true, [B]."""
    # At least one entry: a baseline's hosts have no blueprints, and the index of a blueprint is 0 then.
    answers = np.zeros(max(len(spec.blueprints), 1), dtype=np.bool_)
    for _, b, recipe, _ in _fitting(topology, places, spec, blueprints):
        if question(recipe):
            answers[b] = True
    return answers


def _fitting(
    topology: str,
    places: Sequence[Place],
    spec: ActionSpec,
    blueprints: BlueprintRegistry,
) -> Iterator[tuple[int, int, Blueprint, Place]]:
    """Yields the seeds that could be planted: the indices of slot and blueprint, the recipe, and the place."""
    for place in places:
        for name, recipe in blueprints.fitting(topology, place).items():
            if name in spec.blueprints:
                s = spec.slots.index(place.name)
                b = spec.blueprints.index(name)
                yield s, b, recipe, place


def check_places(
    topology: str,
    places: Sequence[Place],
    blueprints: BlueprintRegistry,
) -> None:
    """Raises ConfigError for a place where no blueprint fits, with the reasons."""
    for place in places:
        if not place.has_source or blueprints.fitting(topology, place):
            continue
        kind = place.topology or topology
        names = blueprints.possible(kind, [True])
        obstacles = [blueprints.get(kind, name).obstacle(place) for name in names]
        # Several blueprints may have the same obstacle.
        reasons = "; ".join(dict.fromkeys(filter(None, obstacles)))
        raise ConfigError(f"slot {place.name}: no blueprint fits between its source and its sink: {reasons}")


def offered(
    topology: str,
    places: Sequence[Place],
    names: Sequence[str],
    blueprints: BlueprintRegistry,
) -> tuple[tuple[str, ...], ...]:
    """Returns which of the blueprints ``names`` fit at each place, in row-major order; () if all fit everywhere."""
    by_slot = {place.name: blueprints.fitting(topology, place) for place in places}
    offers = []
    for slot in row_major(by_slot):
        fitting = tuple(name for name in names if name in by_slot[slot])
        offers.append(fitting)
    # Most hosts need no table.
    if all(len(fitting) == len(names) for fitting in offers):
        return ()
    return tuple(offers)


def largest_sizes(
    topology: str,
    places: Sequence[Place],
    spec: ActionSpec,
    blueprints: BlueprintRegistry,
) -> Ints:
    """Returns the number of parameters of each blueprint in each slot with its largest blend style, [S, B]; 0 where it
    does not fit.

    The gated style is the largest, so a blueprint that is affordable is so in any style. Raises ConfigError for a
    blueprint whose ``parameters`` raises.
    """
    sizes = np.zeros((len(spec.slots), len(spec.blueprints)), dtype=np.int64)
    for s, b, recipe, place in _fitting(topology, places, spec, blueprints):
        sizes[s, b] = _size(recipe, place)
    return sizes


def flops_of_seeds(
    topology: str,
    places: Sequence[Place],
    spec: ActionSpec,
    blueprints: BlueprintRegistry,
    features: Mapping[str, Features],
) -> Floats:
    """Returns the operations of a forward pass of each blueprint's body in each slot, a sample, [S, B].

    ``features`` are those of a pass at each slot. A body that cannot run there counts as 0: it cannot be planted.
    """
    flops = np.zeros((len(spec.slots), len(spec.blueprints)))
    for s, b, recipe, place in _fitting(topology, places, spec, blueprints):
        flops[s, b] = _flops(recipe, place, features[place.name].source)
    return flops


def _flops(recipe: Blueprint, place: Place, source: Tensor) -> float:
    """Returns the operations of a seed of ``recipe`` on a sample of ``source``."""
    if recipe.only_added:
        return _flops_on(recipe, place, source)
    # Seeds expect features in this order.
    if place.order:
        source = source.permute(place.order)
    return _flops_by_channels(recipe, place.channels, tuple(source.shape))


@lru_cache(maxsize=4096)
def _flops_by_channels(
    recipe: Blueprint,
    channels: int,
    shape: tuple[int, ...],
) -> float:
    """The same for a recipe that knows of its place no more than the channels; many envs ask for it."""
    return _flops_on(recipe, Place("", channels), torch.zeros(shape))


def _flops_on(recipe: Blueprint, place: Place, source: Tensor) -> float:
    # A body's weights are float32, whatever the dtype of the features.
    source = source.to(torch.promote_types(source.dtype, torch.float32))
    with seeded(0), torch.no_grad(), counting() as counter:
        try:
            recipe.body(place).to(source).eval()(source)
        except Exception:  # a user may have written it
            return 0.0
    return counter.get_total_flops() / len(source)


def kinds_of(
    topology: str,
    places: Sequence[Place],
    spec: ActionSpec,
    blueprints: BlueprintRegistry,
    at_once: bool = False,
) -> Floats:
    """Returns what each blueprint is, [B, 6], see ``esper.spaces.observation.KINDS``.

    ``at_once`` says whether seeds that may be a part of their host at once are. What a blueprint is built of is read
    from a body for the widest place at which it fits: whoever knows it by this needs not know its name. Raises
    ConfigError if that cannot be built.
    """
    rows = []
    by_place = [(place, blueprints.fitting(topology, place)) for place in places]
    with seeded(0):  # bodies are built, and their weights are not used
        for name in spec.blueprints:
            fitting = [place for place, recipes in by_place if name in recipes]
            place = max(fitting, key=lambda place: place.channels)
            recipe = blueprints.at(topology, place, name)
            with _named_errors(recipe, "be built", place):
                shapes = [p.shape for p in recipe.body(place).parameters()]
            row = (
                *_built_of(shapes),
                recipe.reads_source,
                recipe.zero_at_birth,
                at_once and recipe.at_once,
            )
            rows.append(row)
    return np.array(rows, dtype=np.float64)


def _built_of(shapes: Sequence[torch.Size]) -> tuple[float, float, float]:
    """Returns a fourth of the number of matrices and kernels, and the fractions of parameters in kernels of more than
    one position and in vectors, of a body whose parameters have these shapes."""
    layers = 0
    in_kernels = 0
    in_vectors = 0
    for shape in shapes:
        size = math.prod(shape)
        is_vector = len(shape) < 2 or max(shape) == size  # also one of shape [C, 1, 1]
        if not is_vector:
            layers += 1
        if math.prod(shape[2:]) > 1:
            in_kernels += size
        elif is_vector:
            in_vectors += size
    total = max(sum(map(math.prod, shapes)), 1)  # a body may have no parameters
    return layers / 4, in_kernels / total, in_vectors / total


def _size(recipe: Blueprint, place: Place) -> int:
    """Returns the number of parameters of a seed with its gate, if it can have one."""
    with _named_errors(recipe, "be counted", place):
        size = recipe.size(place)
        if not recipe.only_added:
            size += gate_parameters(place.channels)
        if size < 1:  # 0 says that it does not fit
            raise ValueError(f"its `parameters` says {size}, and a seed needs some to train")
        return size


@contextmanager
def _named_errors(
    recipe: Blueprint,
    what: str,
    place: Place,
) -> Iterator[None]:
    """Turns an error of a blueprint, whose functions a user may have written, into a ConfigError that names it."""
    try:
        yield
    except Exception as error:
        where = f"{place.channels} channels"
        if recipe.only_added:
            where = f"the Place of slot {place.name}"
        if place.obstacle:
            where += f", whose layers are not known ({place.obstacle})"
        reason = f"cannot {what} for {where}: {type(error).__name__}: {error}"
        raise ConfigError(f"blueprint {recipe.name} {reason}; repair it, or leave it out of env.blueprints") from error


def max_seed_parameters(
    training: HostTraining,
    spec: ActionSpec,
    blueprints: BlueprintRegistry,
) -> int:
    """Returns the most parameters that seeds of a host may have at a time."""
    host = training.host
    sizes = largest_sizes(host.topology, host.sites, spec, blueprints)
    # The largest seed in every slot, as far as the budget allows.
    in_all_slots = sizes.max(axis=1, initial=0).sum()
    budget = training.config.env.parameter_budget * host.parameter_count
    return int(min(in_all_slots, budget))
