"""Descriptions of blueprints before they are planted, for controllers and masks: their sizes and parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from esper.config import ConfigError
from esper.lifecycle.slots import Floats, Ints
from esper.seeds.blend import gate_parameters
from esper.seeds.blueprints import Blueprint, BlueprintRegistry
from esper.spaces.action import ActionSpec
from esper.training.host_training import HostTraining
from esper.training.rng import seeded


def largest_sizes(topology: str, channels: Mapping[str, int], spec: ActionSpec, blueprints: BlueprintRegistry) -> Ints:
    """Returns the number of parameters of each blueprint in each slot with its largest blend style, [S, B].

    The gated style is the largest, so a blueprint that is affordable is so in any style. ``channels`` is by slot.
    Raises ConfigError for a blueprint whose ``parameters`` raises.
    """
    recipes = [blueprints.get(topology, name) for name in spec.blueprints]
    widths = [channels[name] for name in spec.slots]
    return np.array([[_size(recipe, width) + gate_parameters(width) for recipe in recipes] for width in widths])


def kinds_of(topology: str, channels: int, spec: ActionSpec, blueprints: BlueprintRegistry) -> Floats:
    """Returns what each blueprint is built of, [B, 3], see ``esper.spaces.observation.KINDS``.

    It is read from a body for ``channels`` channels: whoever knows a blueprint by this needs not know its name. Raises
    ConfigError if that cannot be built.
    """
    rows = []
    with seeded(0):
        for name in spec.blueprints:
            recipe = blueprints.get(topology, name)
            with _named_errors(recipe, "be built", channels):
                shapes = [p.shape for p in recipe.build(channels).parameters()]
            sizes = np.array([math.prod(shape) for shape in shapes])
            spatial = np.array([math.prod(shape[2:]) > 1 for shape in shapes], dtype=bool)
            vector = np.array([len(shape) < 2 or max(shape) == math.prod(shape) for shape in shapes], dtype=bool)
            total = max(int(sizes.sum()), 1)
            rows.append(((~vector).sum() / 4, sizes[spatial].sum() / total, sizes[vector & ~spatial].sum() / total))
    return np.array(rows, dtype=np.float64)


def _size(recipe: Blueprint, channels: int) -> int:
    with _named_errors(recipe, "be counted", channels):
        return int(recipe.parameters(channels))


@contextmanager
def _named_errors(recipe: Blueprint, what: str, channels: int) -> Iterator[None]:
    """Turns an error of a blueprint, whose functions a user may have written, into a ConfigError that names it."""
    try:
        yield
    except Exception as error:
        reason = f"cannot {what} for {channels} channels: {type(error).__name__}: {error}"
        raise ConfigError(f"blueprint {recipe.name} {reason}; repair it, or leave it out of env.blueprints") from error


def max_seed_parameters(training: HostTraining, spec: ActionSpec, blueprints: BlueprintRegistry) -> int:
    """Returns the most parameters that seeds of a host may have at a time."""
    host = training.host
    sizes = largest_sizes(host.topology, {site.name: site.channels for site in host.sites}, spec, blueprints)
    budget = training.config.env.parameter_budget * training.host.parameter_count
    return int(min(sizes.max(axis=1, initial=0).sum(), budget))
