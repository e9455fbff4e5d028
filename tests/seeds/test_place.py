"""Layouts of features, their names in words, and a forward pass at a place."""

import pytest
import torch

from esper.lifecycle.ramps import BlendOperator
from esper.seeds.blend import Seed, gate_parameters, inverse
from esper.seeds.blueprints import BLUEPRINTS
from esper.seeds.place import LAYOUTS, SPATIAL, Features, words_of

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


def test_the_inverse_of_an_order_undoes_it() -> None:
    x = torch.zeros(2, 3, 4, 5)
    for order in ((0, 3, 1, 2), (2, 0, 1, 3), ()):
        assert (
            x.permute(order or (0, 1, 2, 3))
            .permute(inverse(order) or (0, 1, 2, 3))
            .shape
            == x.shape
        )


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


H, SOURCE, KEPT = torch.ones(2, 3), torch.zeros(2, 5), torch.full((2, 4), 7.0)


def test_other_features_at_the_sink_leave_the_source_unless_it_is_the_sink() -> None:
    there = Features(H, SOURCE, {1: KEPT}).with_sink(H + 1)
    assert torch.equal(there.h, H + 1)
    assert there.source is SOURCE
    assert there.earlier == {1: KEPT}
    here = Features.at_sink(H).with_sink(H + 1)
    assert here.source is here.h


def test_a_change_of_each_tensor_keeps_what_is_one_tensor_as_one() -> None:
    there = Features(H, SOURCE, {1: KEPT}).each(lambda x: x + 1)
    assert [float(x.mean()) for x in (there.h, there.source, there.earlier[1])] == [
        2,
        1,
        8,
    ]
    here = Features.at_sink(H).each(torch.clone)
    assert here.h is not H
    assert here.source is here.h


def test_a_later_change_of_the_pass_does_not_reach_one_that_was_kept() -> None:
    earlier = {1: KEPT}
    kept = Features(H, SOURCE, earlier).with_sink(H)
    earlier[2] = H
    assert list(kept.earlier) == [1]
