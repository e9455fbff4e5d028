"""Units of layers, told before and after they grow."""

from __future__ import annotations

import pytest
from torch import nn

from esper.core.place import Place
from esper.core.site import Site
from esper.core.units import LayerUnits, layer_units, units_in

PAIR = (nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def site(*layers: nn.Module) -> Site:
    return Site(Place("r2c0", 2, has_source=True, layers=layers, topology="mlp"))


def test_a_layer_that_has_merged_is_as_wide_as_it_is_now() -> None:
    merged = site(*PAIR)
    assert units_in(merged) is None
    assert layer_units(merged, "first", "last", 3) == LayerUnits("first", 3, 5)
    assert str(LayerUnits("first", 1000, 2000)) == "first: 1,000 -> 2,000 units"


@pytest.mark.parametrize("layers", [(), (nn.Linear(3, 3),)])
def test_places_of_unknown_or_single_layers_get_no_units(
    layers: tuple[nn.Module, ...],
) -> None:
    assert layer_units(site(*layers), "same", "same", 3) is None
