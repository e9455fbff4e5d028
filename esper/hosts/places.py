"""Places of a model's slots: the layout of the features there, and the layers from a source to a sink."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from esper.hosts.between import Between, layers_of
from esper.hosts.layout import Layout, Shapes
from esper.hosts.site_path import SitePath
from esper.seeds.place import Place


def layout_of(
    name: str,
    path: SitePath,
    h: Tensor,
    declared: str | None,
    shapes: Shapes,
    batch: int | None,
) -> Layout:
    """Returns the layout of features ``h`` of slot ``name``: that of the ``declared`` topology, or the one that is
    found. Seeds with a source work on each sample and position alike, so that it need not be known which is which."""
    if declared is not None:
        return Layout(declared)
    if path.source is not None:
        batch = None
    return shapes.layout_of(f"slot {name}: {path.sink}", h, batch)


def place_of(
    model: nn.Module,
    name: str,
    channels: int,
    layout: Layout,
    between: Between | None,
) -> Place:
    """Returns the place of a slot of ``model``, with what lies ``between`` its source and sink if it has a source."""
    place = Place(name, channels, topology=layout.topology, order=layout.order)
    if between is None:
        return place
    layers = layers_of(model, between.parts)
    return replace(place, has_source=True, layers=layers, obstacle=between.obstacle)
