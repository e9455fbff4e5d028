"""Descriptions of blueprints before they are planted, for controllers and masks: their sizes, costs and parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from esper.config import ConfigError
from esper.env.state import Choices
from esper.hosts.flops import counting
from esper.hosts.host import features_at, row_major
from esper.lifecycle.slots import Bools, Floats, Ints
from esper.seeds.blend import gate_parameters
from esper.seeds.blueprints import Blueprint, BlueprintRegistry, choose, source
from esper.seeds.features import Features
from esper.seeds.place import Place
from esper.spaces.action import ActionSpec
from esper.training.host_training import HostTraining
from esper.training.rng import seeded


def spec_of(
    topology: str, places: Sequence[Place], blueprints: BlueprintRegistry, wanted: tuple[str, ...] | None
) -> ActionSpec:
    """Returns the slots of ``places`` with the blueprints that may be planted in them: ``wanted``, or all that fit.

    Raises ConfigError for an unknown blueprint, and for a place in which none fits.
    """
    check_places(topology, places, blueprints)
    names = choose(wanted, blueprints.names(topology, places), f"{topology} hosts")
    return ActionSpec(row_major(place.name for place in places), names, offered(topology, places, names, blueprints))


def choices_of(training: HostTraining, spec: ActionSpec, blueprints: BlueprintRegistry) -> Choices:
    """Returns what is known of a host in training and of the seeds that could be planted in it.

    Raises ConfigError for a blueprint that cannot be built, or whose ``parameters`` raises.
    """
    host = training.host
    with seeded(0), counting() as counter:
        features = features_at(host, training.sample)
    return Choices(
        host_parameters=host.parameter_count,
        host_flops=counter.get_total_flops() / len(training.sample),
        parameters=largest_sizes(host.topology, host.sites, spec, blueprints),
        flops=flops_of_seeds(host.topology, host.sites, spec, blueprints, features),
        kinds=kinds_of(host.topology, host.sites, spec, blueprints, training.config.env.at_once),
    )


def joining(topology: str, spec: ActionSpec, blueprints: BlueprintRegistry, at_once: bool) -> Bools:
    """Returns which blueprints' seeds are a part of their host at once, if that is wanted, [B]."""
    recipes = [blueprints.get(topology, name) for name in spec.blueprints]
    return np.array([at_once and recipe.at_once for recipe in recipes] or [False], dtype=np.bool_)


def only_added(topology: str, spec: ActionSpec, blueprints: BlueprintRegistry) -> Bools:
    """Returns which blueprints' seeds are added to features whatever the blend style, [B]."""
    recipes = [blueprints.get(topology, name) for name in spec.blueprints]
    return np.array([recipe.only_added for recipe in recipes] or [False], dtype=np.bool_)


def check_places(topology: str, places: Sequence[Place], blueprints: BlueprintRegistry) -> None:
    """Raises ConfigError for a place where no blueprint fits, with the reasons."""
    for place in places:
        if place.has_source and not blueprints.names(topology, [place]):
            found = {name: blueprints.get(topology, name).obstacle(place) for name in source.NAMES}
            reasons = "; ".join(dict.fromkeys(reason for reason in found.values() if reason))
            raise ConfigError(f"slot {place.name}: no blueprint fits between its source and its sink: {reasons}")


def offered(
    topology: str, places: Sequence[Place], names: Sequence[str], blueprints: BlueprintRegistry
) -> tuple[tuple[str, ...], ...]:
    """Returns which of the blueprints ``names`` fit at each place, in row-major order; () if all fit everywhere."""
    by_name = {place.name: place for place in places}
    recipes = [blueprints.get(topology, name) for name in names]
    fitting = tuple(
        tuple(recipe.name for recipe in recipes if recipe.fits(by_name[slot])) for slot in row_major(by_name)
    )
    return () if all(len(of_slot) == len(names) for of_slot in fitting) else fitting


def largest_sizes(topology: str, places: Sequence[Place], spec: ActionSpec, blueprints: BlueprintRegistry) -> Ints:
    """Returns the number of parameters of each blueprint in each slot with its largest blend style, [S, B]; 0 where it
    does not fit.

    The gated style is the largest, so a blueprint that is affordable is so in any style. Raises ConfigError for a
    blueprint whose ``parameters`` raises.
    """
    recipes = [blueprints.get(topology, name) for name in spec.blueprints]
    by_name = {place.name: place for place in places}
    return np.array([[_size(recipe, by_name[name]) for recipe in recipes] for name in spec.slots])


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
    by_name = {place.name: place for place in places}
    found = np.zeros((len(spec.slots), len(spec.blueprints)))
    for s, slot in enumerate(spec.slots):
        for b, name in enumerate(spec.blueprints):
            recipe, place = blueprints.get(topology, name), by_name[slot]
            if recipe.fits(place):
                found[s, b] = _flops(recipe, place, features[slot].source)
    return found


def _flops(recipe: Blueprint, place: Place, source: Tensor) -> float:
    """Returns the operations of a seed of ``recipe`` on a sample of ``source``."""
    if recipe.only_added:
        return _flops_on(recipe, place, source)
    return _flops_by_channels(recipe, place.channels, tuple(source.shape))


@lru_cache(maxsize=4096)
def _flops_by_channels(recipe: Blueprint, channels: int, shape: tuple[int, ...]) -> float:
    """The same for a recipe that knows of its place no more than the channels; many envs ask for it."""
    return _flops_on(recipe, Place("", channels), torch.zeros(shape))


def _flops_on(recipe: Blueprint, place: Place, source: Tensor) -> float:
    source = source.to(torch.promote_types(source.dtype, torch.float32))
    with seeded(0), torch.no_grad(), counting() as counter:
        try:
            recipe.body(place).to(source).eval()(source)
        except Exception:
            return 0.0
    return counter.get_total_flops() / len(source)


def kinds_of(
    topology: str, places: Sequence[Place], spec: ActionSpec, blueprints: BlueprintRegistry, at_once: bool = False
) -> Floats:
    """Returns what each blueprint is, [B, 6], see ``esper.spaces.observation.KINDS``.

    ``at_once`` says whether seeds that may be a part of their host at once are. What a blueprint is built of is read
    from a body for the widest place at which it fits: whoever knows it by this needs not know its name. Raises
    ConfigError if that cannot be built.
    """
    rows = []
    with seeded(0):
        for name in spec.blueprints:
            recipe = blueprints.get(topology, name)
            place = max((place for place in places if recipe.fits(place)), key=lambda place: place.channels)
            with _named_errors(recipe, "be built", place):
                shapes = [p.shape for p in recipe.body(place).parameters()]
            sizes = np.array([math.prod(shape) for shape in shapes])
            spatial = np.array([math.prod(shape[2:]) > 1 for shape in shapes], dtype=bool)
            vector = np.array([len(shape) < 2 or max(shape) == math.prod(shape) for shape in shapes], dtype=bool)
            total = max(int(sizes.sum()), 1)
            built_of = ((~vector).sum() / 4, sizes[spatial].sum() / total, sizes[vector & ~spatial].sum() / total)
            begins = (recipe.reads_source, recipe.zero_at_birth, at_once and recipe.at_once)
            rows.append((*built_of, *begins))
    return np.array(rows, dtype=np.float64)


def _size(recipe: Blueprint, place: Place) -> int:
    """Returns the number of parameters of a seed with its gate, if it can have one."""
    if not recipe.fits(place):
        return 0
    with _named_errors(recipe, "be counted", place):
        return recipe.size(place) + (0 if recipe.only_added else gate_parameters(place.channels))


@contextmanager
def _named_errors(recipe: Blueprint, what: str, place: Place) -> Iterator[None]:
    """Turns an error of a blueprint, whose functions a user may have written, into a ConfigError that names it."""
    try:
        yield
    except Exception as error:
        reason = f"cannot {what} for {place.channels} channels: {type(error).__name__}: {error}"
        raise ConfigError(f"blueprint {recipe.name} {reason}; repair it, or leave it out of env.blueprints") from error


def max_seed_parameters(training: HostTraining, spec: ActionSpec, blueprints: BlueprintRegistry) -> int:
    """Returns the most parameters that seeds of a host may have at a time."""
    host = training.host
    sizes = largest_sizes(host.topology, host.sites, spec, blueprints)
    budget = training.config.env.parameter_budget * training.host.parameter_count
    return int(min(sizes.max(axis=1, initial=0).sum(), budget))
