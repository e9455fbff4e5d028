"""Layouts of features, and their names in words."""

import pytest
import torch

from esper.core.blend import Seed, gate_parameters, inverse
from esper.core.blueprints import BLUEPRINTS
from esper.core.place import LAYOUTS, SPATIAL, words_of
from esper.core.ramps import BlendOperator

SIDES = {"cnn": (2, 6, 5, 4), "cnn1d": (2, 6, 5), "cnn3d": (2, 6, 3, 5, 4)}


@pytest.mark.parametrize(
    ("topology", "order", "words"),
    [
        ("cnn", (), "[N, C, H, W]"),
        ("cnn", (0, 3, 1, 2), "[N, H, W, C]"),
        ("encoder", (1, 0, 2), "[T, N, D]"),
        ("cnn3d", (0, 4, 1, 2, 3), "[N, D, H, W, C]"),
        ("mlp", (), "[N, D]"),
    ],
)
def test_the_dimensions_are_named_in_their_order(
    topology: str, order: tuple[int, ...], words: str
) -> None:
    assert words_of(topology, order) == words


@pytest.mark.parametrize("topology", SPATIAL)
@pytest.mark.parametrize("operator", BlendOperator)
def test_seeds_of_every_spatial_topology_keep_shapes_and_have_the_parameters_that_they_state(
    topology: str, operator: BlendOperator
) -> None:
    h = torch.randn(SIDES[topology])
    assert h.dim() == LAYOUTS[topology][0]
    assert len(BLUEPRINTS.names(topology)) == 7
    for name in BLUEPRINTS.names(topology):
        recipe = BLUEPRINTS.get(topology, name)
        seed = Seed(recipe.build(6), operator, 6, topology)
        gate = gate_parameters(6) if operator is BlendOperator.GATE else 0
        assert sum(p.numel() for p in seed.parameters()) == recipe.parameters(6) + gate
        assert seed(h).shape == h.shape


@pytest.mark.parametrize("topology", [*SPATIAL, "encoder"])
@pytest.mark.parametrize("operator", BlendOperator)
def test_features_in_another_order_get_the_same_delta_in_that_order(
    topology: str, operator: BlendOperator
) -> None:
    torch.manual_seed(0)
    shape = SIDES.get(topology, (2, 5, 6))
    order = {"encoder": (1, 0, 2)}.get(
        topology, (0, len(shape) - 1, *range(1, len(shape) - 1))
    )
    body = BLUEPRINTS.get(topology, "attention").build(6)
    usual = Seed(body, operator, 6, topology)
    other = Seed(body, operator, 6, topology, order)
    if usual.gate is not None and other.gate is not None:
        other.gate.load_state_dict(usual.gate.state_dict())
    h = torch.randn(shape)
    moved = h.permute(inverse(order))
    torch.testing.assert_close(other(moved), usual(h).permute(inverse(order)))
