"""The units of layers that grow."""

from __future__ import annotations

from dataclasses import dataclass

from esper.core.blueprints.source import Extensible, units_with, width_at
from esper.core.site import Site


@dataclass(frozen=True)
class LayerUnits:
    """A layer that can get more units."""

    name: str
    """Its path in the model."""
    before: int
    after: int
    """Its units, or channels of a convolution, or heads of attention."""

    def __str__(self) -> str:
        return f"{self.name}: {self.before:,} -> {self.after:,} units"


def units_in(site: Site) -> tuple[int, int] | None:
    """Returns the units of a layer before and after the widening that is planted at its site; None without one."""
    if site.planted is None:
        return None
    after = units_with(site.planted.blueprint.name, site.place)
    if after is None:
        return None
    return width_at(site.place), after


def layer_units(
    site: Site,
    source: str,
    sink: str,
    before: int,
) -> LayerUnits | None:
    """Returns the units of the layer between two paths, ``before`` at first; None for a place that gets no units."""
    place = site.place
    if not place.layers or (source == sink and not isinstance(place.layers[0], Extensible)):
        return None  # a LoRA adds no units
    after = width_at(place)
    grown = units_in(site)
    if site.fossil and grown is not None:
        after = grown[1]
    return LayerUnits(source, before, after)
