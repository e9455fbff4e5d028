"""The registry of blueprints by (topology, name)."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from types import FunctionType
from typing import Any

from torch import nn

from esper.config import ConfigError, did_you_mean
from esper.core.place import LAYOUTS, Place

Factory = Callable[[Any], nn.Module]
"""Makes a body from the number of channels, or from a :class:`Place`."""


def no_obstacle(_place: Place) -> str | None:
    """Returns None: every place will do."""
    return None


@dataclass(frozen=True)
class Blueprint:
    """A recipe for seeds: ``build(channels)`` makes a body that maps features to a change of them, of the same shape.

    With ``reads_source`` it is one for places with a source: ``build(place)`` makes a body that maps the features at
    the source to a change of those at the sink, both with their dimensions in the order that the host gives them.
    ``build(place)`` is called with ``takes_place`` as well.

    ``esper.core.blend.Seed`` adds the blend operator to it. ``esper.core.site.Site.plant`` tries it on features and
    refuses it if it raises, has nothing to train or another number of parameters than ``parameters`` says, has not the
    shape of the sink, or is not finite.
    """

    topology: str
    name: str
    description: str
    build: Factory
    parameters: Callable[[Any], int]
    """Returns the exact number of parameters of what ``build`` makes; a gated seed has ``gate_parameters`` more."""
    reads_source: bool = False
    zero_at_birth: bool = False
    """Whether the delta of a new seed is 0, so that it changes nothing at any alpha; planting one checks it."""
    takes_place: bool = False
    """Whether a body that reads its sink is made for a :class:`Place`, such as of the host's own blocks."""
    copies: Callable[[Place], Sequence[nn.Module]] | None = None
    """Returns the modules of the host whose weights a new body has, in the order of its own parameters; None: none."""
    obstacle: Callable[[Place], str | None] = no_obstacle
    """Returns the reason why a place with a source, or without one, cannot have such a seed; None if it can."""
    too_small: Callable[[Place], str | None] = no_obstacle
    """Returns the reason why a place cannot have such a seed at its width, but may once it is wider; None if it can."""
    if_named: bool = False
    """Whether controllers may plant it only if ``env.blueprints`` names it."""
    family: str = ""
    """Name of the blueprints whose seeds at one place have as many operations for each parameter; "" for none."""

    def misfit(self, place: Place, wider: bool = False) -> str | None:
        """Returns the reason why such a seed is not offered at ``place``; None if it is, or with ``wider``, may be once
        the place is wider."""
        if self.reads_source and not place.has_source:
            return "it reads a source (reads_source=True), and the site has none"
        if place.has_source and not self.reads_source:
            return "the site has a source, and it reads the sink (reads_source=False)"
        reason = self.obstacle(place)
        if reason is None and not wider:
            reason = self.too_small(place)
        return reason

    @property
    def only_added(self) -> bool:
        """Whether a seed's delta is added, whatever the blend operator: the others are for a body that is one only by
        its channels."""
        return self.reads_source or self.takes_place

    @property
    def at_once(self) -> bool:
        """Whether a seed may be a part of its host at once, without having been tried."""
        return self.zero_at_birth or self.copies is not None

    def body(self, place: Place) -> nn.Module:
        """Makes a body for ``place``."""
        return self.build(place if self.only_added else place.channels)

    def size(self, place: Place) -> int:
        """Returns the number of parameters of a body for ``place``."""
        return int(self.parameters(place if self.only_added else place.channels))


class BlueprintRegistry:
    """Blueprints in order of registration. An env copies the registry when it is made and ignores later changes."""

    def __init__(self, blueprints: tuple[Blueprint, ...] = ()) -> None:
        self._table: dict[tuple[str, str], Blueprint] = {}
        for blueprint in blueprints:
            self.add(blueprint)

    def add(self, blueprint: Blueprint) -> None:
        """Adds a blueprint, or replaces it if the function or class at the top of a file or notebook cell that makes it
        is defined again.

        Raises ConfigError for an unknown topology, or if its topology already has one with the same name from
        elsewhere.
        """
        topology = blueprint.topology
        if topology not in LAYOUTS:
            problem = f"unknown topology {topology!r}{did_you_mean(topology, LAYOUTS)}; known: {', '.join(LAYOUTS)}"
            raise ConfigError(f"blueprint {blueprint.name}: {problem}")
        key = (topology, blueprint.name)
        known = self._table.get(key)
        if known is not None and _origin(known.build) != _origin(blueprint.build):
            raise ConfigError(f"{topology} already has a blueprint named {blueprint.name!r}; choose another name")
        self._table[key] = blueprint

    def register(
        self,
        topology: str,
        name: str,
        parameters: Callable[[Any], int],
        reads_source: bool = False,
        **more: Any,
    ) -> Callable[[Factory], Factory]:
        """Registers the decorated factory; the first line of its docstring becomes the description.

        With ``reads_source``, the factory and ``parameters`` are called with a :class:`Place` in place of channels.
        ``more``, such as ``zero_at_birth`` and ``obstacle``, is as in :class:`Blueprint`.
        """

        def decorate(build: Factory) -> Factory:
            description = (build.__doc__ or "").strip().partition("\n")[0]
            blueprint = Blueprint(topology, name, description, build, parameters, reads_source, **more)
            self.add(blueprint)
            return build

        return decorate

    def topologies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(topology for topology, _ in self._table))

    def names(
        self,
        topology: str,
        places: Collection[Place] | None = None,
        if_named: bool = False,
        wider: bool = False,
    ) -> tuple[str, ...]:
        """Returns the names of a topology's blueprints: of those that fit at one of ``places``; None: of those that
        are made of a number of channels, and so fit wherever the topology does. With ``if_named``, those that are not
        offered by default are included; with ``wider``, those that fit only once a place is wider."""
        if places is None:
            return tuple(blueprint.name for blueprint in self._of(topology) if not blueprint.only_added)
        present: dict[str, None] = {}
        fitting: set[str] = set()
        for place in places:
            kind = place.topology or topology
            for blueprint in self._of(kind):
                if if_named or not blueprint.if_named:
                    present[blueprint.name] = None
            fitting.update(self.fitting(topology, place, wider))
        return tuple(name for name in present if name in fitting)

    def fitting(
        self,
        topology: str,
        place: Place,
        wider: bool = False,
        names: Collection[str] | None = None,
    ) -> dict[str, Blueprint]:
        """Returns the blueprints that fit at ``place`` in a host of this topology, by name; with ``wider``, also those
        that fit once it is wider; with ``names``, of these."""
        possible = self._of(place.topology or topology)
        wanted = [blueprint for blueprint in possible if names is None or blueprint.name in names]
        return {blueprint.name: blueprint for blueprint in wanted if blueprint.misfit(place, wider) is None}

    def at(
        self,
        topology: str,
        place: Place,
        name: str,
    ) -> Blueprint:
        """Returns the blueprint of that name for ``place`` in a host of this topology. Raises ValueError as
        :meth:`get`."""
        return self.get(place.topology or topology, name)

    def possible(
        self,
        topology: str,
        reading: Collection[bool],
    ) -> tuple[str, ...]:
        """Returns the names of a topology's blueprints that read a source, that read their sink, or both."""
        return tuple(blueprint.name for blueprint in self._of(topology) if blueprint.reads_source in reading)

    def misfit(
        self,
        topology: str,
        places: Collection[Place],
        name: str,
    ) -> str | None:
        """Returns the reasons why a blueprint fits at none of ``places`` in a host of this topology; None if no
        blueprint has this name. With the topology "", places may be of any."""
        recipes = {known: recipe for (known, other), recipe in self._table.items() if other == name}
        if not recipes:
            return None
        slots = defaultdict[str | None, list[str]](list)
        for place in places:
            kind = place.topology or topology or next(iter(recipes))
            recipe = recipes.get(kind)
            if recipe is None:
                reason: str | None = f"it is one for {', '.join(recipes)}, not for {kind}"
            else:
                reason = recipe.misfit(place)
            slots[reason].append(place.name)
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in slots.items())

    def _of(self, topology: str) -> list[Blueprint]:
        return [blueprint for (known, _), blueprint in self._table.items() if known == topology]

    def get(self, topology: str, name: str) -> Blueprint:
        """Returns a blueprint. Raises ValueError listing the known names for an unknown name."""
        blueprint = self._table.get((topology, name))
        if blueprint is None:
            known = [other.name for other in self._of(topology)]
            raise ValueError(f"unknown blueprint {name!r} for {topology}; known: {', '.join(known) or 'none'}")
        return blueprint

    def copy(self) -> BlueprintRegistry:
        return BlueprintRegistry(tuple(self._table.values()))

    def copy_of(self, blueprints: BlueprintRegistry | None) -> BlueprintRegistry:
        """Returns a copy of a registry that a user passed, of this one for None. Raises ConfigError for anything else,
        such as the names of blueprints."""
        if blueprints is None:
            return self.copy()
        if not isinstance(blueprints, BlueprintRegistry):
            raise ConfigError(
                f"blueprints is {short(blueprints)}; expected a BlueprintRegistry. Names are chosen by "
                'config={"env": {"blueprints": [...]}}'
            )
        return blueprints.copy()


def _origin(build: Factory) -> tuple[str, str] | Factory:
    """Returns the file and name of a function or class at the top of a file or notebook cell, which are the same when
    it runs again; other callables themselves."""
    if not isinstance(build, FunctionType | type) or "<" in build.__qualname__:
        return build
    module = build.__module__
    file: str | None = getattr(sys.modules.get(module), "__file__", None)
    if file:
        module = str(Path(file).resolve())
    return module, build.__qualname__


BLUEPRINTS = BlueprintRegistry()
"""Esper's own blueprints, and those that users add with ``@BLUEPRINTS.register(...)`` before they make an env."""
