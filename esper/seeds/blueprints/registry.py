"""The registry of blueprints by (topology, name)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

from torch import nn

from esper.config import ConfigError, did_you_mean

Factory = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Blueprint:
    """A recipe for seeds: ``build(channels)`` makes a body that maps features to a change of them, of the same shape.

    ``esper.seeds.blend.Seed`` adds the blend operator to it. ``esper.seeds.site.Site.plant`` tries it on features and
    refuses it if it raises, has nothing to train or another number of parameters than ``parameters`` says, changes the
    shape, or is not finite.
    """

    topology: str
    name: str
    description: str
    build: Factory
    parameters: Callable[[int], int]
    """Returns the exact number of parameters of ``build(channels)``; a gated seed has ``gate_parameters`` more."""


class BlueprintRegistry:
    """Blueprints in order of registration. An env copies the registry when it is made and ignores later changes."""

    def __init__(self, blueprints: tuple[Blueprint, ...] = ()) -> None:
        self._table: dict[tuple[str, str], Blueprint] = {}
        for blueprint in blueprints:
            self.add(blueprint)

    def add(self, blueprint: Blueprint) -> None:
        """Adds a blueprint, or replaces it if the function or class at the top of a file or notebook cell that makes it
        is defined again.

        Raises ValueError if its topology already has one with the same name from elsewhere.
        """
        key = (blueprint.topology, blueprint.name)
        if key in self._table and _origin(self._table[key].build) != _origin(blueprint.build):
            raise ValueError(f"{blueprint.topology} already has a blueprint named {blueprint.name!r}")
        self._table[key] = blueprint

    def register(self, topology: str, name: str, parameters: Callable[[int], int]) -> Callable[[Factory], Factory]:
        """Registers the decorated factory; the first line of its docstring becomes the description."""

        def decorate(build: Factory) -> Factory:
            description = (build.__doc__ or "").strip().partition("\n")[0]
            self.add(Blueprint(topology, name, description, build, parameters))
            return build

        return decorate

    def topologies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(topology for topology, _ in self._table))

    def names(self, topology: str) -> tuple[str, ...]:
        return tuple(name for known, name in self._table if known == topology)

    def get(self, topology: str, name: str) -> Blueprint:
        """Returns a blueprint. Raises ValueError listing the known names if there is none with this name."""
        blueprint = self._table.get((topology, name))
        if blueprint is None:
            known = ", ".join(self.names(topology)) or "none"
            raise ValueError(f"unknown blueprint {name!r} for {topology}; known: {known}")
        return blueprint

    def copy(self) -> BlueprintRegistry:
        return BlueprintRegistry(tuple(self._table.values()))


def _origin(build: Factory) -> tuple[str, str] | Factory:
    """Returns the file and name of a function or class at the top of a file or notebook cell, which are the same when
    it runs again; other callables themselves."""
    if not isinstance(build, FunctionType | type) or "<" in build.__qualname__:
        return build
    file: str | None = getattr(sys.modules.get(build.__module__), "__file__", None)
    return str(Path(file).resolve()) if file else build.__module__, build.__qualname__


BLUEPRINTS = BlueprintRegistry()
"""Esper's own blueprints, and those that users add with ``@BLUEPRINTS.register(...)`` before they make an env."""


def choose(wanted: tuple[str, ...] | None, known: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Returns the blueprints that a controller may plant: ``wanted`` (``env.blueprints``), or all ``known`` if None.

    Raises ConfigError listing the known names if one is unknown or given twice, or if there is none to choose.
    ``where`` names the topology or task in the message.
    """
    if not known:
        raise ConfigError(f"no blueprint is registered for {where}, so nothing could be planted")
    chosen = known if wanted is None else wanted
    problems = [f"unknown {name!r}{did_you_mean(name, known)}" for name in dict.fromkeys(chosen) if name not in known]
    problems += [f"{name!r} is given more than once" for name in dict.fromkeys(chosen) if chosen.count(name) > 1]
    if not chosen:
        problems = ["it is empty; a run that plants nothing has run.controller = 'none'"]
    if problems:
        raise ConfigError(f"env.blueprints: {'; '.join(problems)}; known for {where}: {', '.join(known)}")
    return chosen
