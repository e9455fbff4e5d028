"""Blueprints that read a source: what they compute, where they fit, and the wider network that they stand for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.core.blueprints import BLUEPRINTS, source
from esper.core.place import Features, Place
from esper.core.ramps import BlendOperator
from esper.core.site import seed_of
from esper.hosts.cnn import CNNHost
from esper.hosts.host import SegmentedHost
from esper.hosts.transformer import CausalAttention, TransformerHost
from tests.core.blueprints.test_elementwise import Swish

HOSTS: dict[str, Callable[[], SegmentedHost]] = {
    "plain": lambda: CNNHost(1, 10, base=3, blocks=2, pool_last=False),
    "one row": lambda: CNNHost(1, 10, base=4, blocks=3, rows=1),
    "fused": lambda: CNNHost(1, 10, base=8, blocks=3),
    "text": lambda: TransformerHost(11, 8, layers=2, heads=2, block=6, slots=2),
}


def made(kind: str) -> tuple[SegmentedHost, Tensor]:
    """A host with all slots, and inputs."""
    torch.manual_seed(0)
    host = HOSTS[kind]()
    host.use_slots(["all"])
    if kind == "text":
        return host, torch.randint(0, 11, (4, 6))
    return host, torch.randn(16, 1, 16, 16)


def offered(host: SegmentedHost) -> list[tuple[int, str]]:
    """Every site with a source, and every blueprint that fits there."""
    return [
        (number, name)
        for number, place in enumerate(host.sites)
        for name in BLUEPRINTS.names(host.topology, [place])
        if place.has_source
    ]


def grown(
    host: SegmentedHost,
    x: Tensor,
    number: int,
    seed: nn.Module | None,
    alpha: float = 1.0,
) -> Tensor:
    def hook(site: int, at: Features) -> Tensor:
        return (
            torch.add(at.h, seed(at.source), alpha=alpha)
            if site == number and seed is not None
            else at.h
        )

    return host.forward_with_hook(x, hook)


@pytest.mark.parametrize("kind", HOSTS)
def test_a_new_seed_changes_no_bit_at_any_alpha_and_has_the_parameters_that_it_states(
    kind: str,
) -> None:
    host, x = made(kind)
    assert {name for _, name in offered(host)} >= {"widen_quarter", "widen_whole"}
    for training in (True, False):
        host.train(training)
        wanted = grown(copy.deepcopy(host), x, 0, None)
        for number, name in offered(host):
            blueprint, place = BLUEPRINTS.get(host.topology, name), host.sites[number]
            seed = seed_of(blueprint, BlendOperator.GATE, place).train(training)
            assert seed.operator is BlendOperator.ADD
            for alpha in (0.5, 1.0):
                assert torch.equal(
                    grown(copy.deepcopy(host), x, number, seed, alpha), wanted
                ), (place.name, name)
            assert sum(p.numel() for p in seed.parameters()) == blueprint.size(place)


@pytest.mark.parametrize("kind", HOSTS)
def test_every_parameter_learns_within_two_steps(kind: str) -> None:
    """In the first step only the last factor has a gradient."""
    host, x = made(kind)
    y = torch.randint(0, 10, (4, 6) if kind == "text" else (16,))
    for number, name in offered(host):
        seed = seed_of(
            BLUEPRINTS.get(host.topology, name), BlendOperator.ADD, host.sites[number]
        )
        optimizer, alive = torch.optim.SGD(seed.parameters(), 0.1), set[str]()
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(
                grown(host, x, number, seed).flatten(0, -2), y.flatten()
            ).backward()
            alive |= {
                key
                for key, p in seed.named_parameters()
                if p.grad is not None and float(p.grad.norm()) > 0
            }
            optimizer.step()
        # A bias before BatchNorm would have none; and a shift of all keys changes no attention.
        assert alive == dict(seed.named_parameters()).keys(), (
            host.sites[number].name,
            name,
        )


def test_more_heads_are_those_of_attention_with_as_many() -> None:
    torch.manual_seed(0)
    attention = CausalAttention(8, 2).double()
    place = Place("r0c0", 8, True, (attention,))
    seed = seed_of(
        BLUEPRINTS.get("transformer", "widen_half"), BlendOperator.ADD, place
    ).double()
    more = seed.body
    assert isinstance(more, CausalAttention)
    nn.init.normal_(more.project.weight)
    assert (more.heads, more.head_width, more.project.bias) == (1, 4, None)
    wider = CausalAttention(8, 3, head_width=4).double()
    own, new = attention.query_key_value, more.query_key_value
    parts = [
        torch.cat(pair)
        for pair in zip(own.weight.chunk(3), new.weight.chunk(3), strict=True)
    ]
    biases = [
        torch.cat(pair)
        for pair in zip(own.bias.chunk(3), new.bias.chunk(3), strict=True)
    ]
    wider.query_key_value.weight.data = torch.cat(parts).detach()
    wider.query_key_value.bias.data = torch.cat(biases).detach()
    wider.project.weight.data = torch.cat(
        [attention.project.weight, more.project.weight], dim=1
    ).detach()
    wider.project.bias.data = attention.project.bias.detach()
    h = torch.randn(3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(wider(h), attention(h) + seed(h), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(12, 20),
        nn.Conv2d(12, 20, 3, stride=2, padding=1),
        nn.Conv1d(12, 20, 5, padding=2, bias=False),
    ],
)
def test_a_lora_is_a_change_of_the_layers_weights(layer: nn.Module) -> None:
    place = Place("r0c0", 20, True, (layer,))
    seed = seed_of(BLUEPRINTS.get("cnn", "lora_2"), BlendOperator.ADD, place)
    down, up = seed.body  # type: ignore[misc]
    nn.init.normal_(up.weight)
    shape = {nn.Linear: (4, 12), nn.Conv2d: (4, 12, 9, 9), nn.Conv1d: (4, 12, 9)}[
        type(layer)
    ]
    x = torch.randn(shape)
    changed = copy.deepcopy(layer)
    product = up.weight.flatten(1) @ down.weight.flatten(1)
    changed.weight.data += product.view_as(changed.weight)  # type: ignore[operator, union-attr, arg-type]
    torch.testing.assert_close(changed(x), layer(x) + seed(x), rtol=1e-4, atol=1e-5)
    assert torch.linalg.matrix_rank(product) == 2


def widenings(place: Place) -> tuple[str, ...]:
    """The widenings among the blueprints that fit at a place."""
    return tuple(
        name for name in BLUEPRINTS.names("mlp", [place]) if name in source.SHARES
    )


REFUSED = {
    "one layer": ((nn.Linear(4, 4),), "two layers"),
    "a norm over all": (
        (nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)),
        "LayerNorm, in which units depend",
    ),
    "groups": ((nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4)), "groups"),
    "computed": (
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
        "neither|computed",
    ),
    "recurrent": (
        (nn.GRU(4, 4), nn.Linear(4, 4)),
        "GRU is neither a linear layer nor a convolution",
    ),
    "folded": (
        (nn.Linear(4, 6), nn.ReLU(), nn.Linear(4, 4)),
        "no multiple of the 6 units",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_widened_have_a_reason(name: str) -> None:
    layers, reason = REFUSED[name]
    place = Place("r0c0", 4, True, layers)
    found = BLUEPRINTS.get("cnn", "widen_whole").obstacle(place)
    assert found is not None
    assert any(part in found for part in reason.split("|")), found
    assert widenings(place) == ()


@pytest.mark.parametrize(
    ("width", "wanted"),
    [
        (3, (1, 2, 3, 9, 21, 45)),
        (1, (1, 1, 1, 3, 7, 15)),
        (16, (8, 8, 16, 48, 112, 240)),
        (64, (16, 32, 64, 192, 448, 960)),
        (10, (2, 5, 10, 30, 70, 150)),
    ],
)
def test_a_width_that_is_a_multiple_of_eight_grows_by_eights(
    width: int, wanted: tuple[int, ...]
) -> None:
    layer = nn.Linear(4, width)
    assert (
        tuple(source.units_of(share, layer) for share in source.SHARES.values())
        == wanted
    )


def test_large_widenings_are_offered_only_by_name() -> None:
    place = Place("r0c0", 4, True, (nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4)))
    assert widenings(place) == ("widen_quarter", "widen_half", "widen_whole")
    every = BLUEPRINTS.names("mlp", [place], if_named=True)
    assert set(every) == set(source.SHARES)
    for name, units in (("widen_x4", 3 * 64), ("widen_x8", 7 * 64)):
        blueprint = BLUEPRINTS.get("mlp", name)
        first, _, last = blueprint.body(place)
        assert (first.out_features, last.in_features) == (units, units)
        assert not last.weight.any()


@pytest.mark.parametrize(
    ("width", "offered"),
    [
        (1, ("widen_whole",)),
        (2, ("widen_half", "widen_whole")),
        (8, ("widen_whole",)),
        (16, ("widen_half", "widen_whole")),
    ],
)
def test_equal_widenings_are_offered_once_by_the_name_of_the_largest(
    width: int, offered: tuple[str, ...]
) -> None:
    layers = (nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))
    place = Place("r0c0", 4, True, layers)
    assert widenings(place) == offered
    units = source.units_of(0.25, layers[0])
    assert (
        BLUEPRINTS.get("mlp", "widen_quarter").misfit(place)
        == f"it is {offered[0]} here: {units} more units"
    )


def test_a_place_without_a_source_is_offered_what_reads_the_sink_and_others_are_not() -> (
    None
):
    residual, own = (
        Place("r0c0", 4),
        Place("r0c1", 4, True, (nn.Linear(4, 4), nn.Linear(4, 4))),
    )
    assert BLUEPRINTS.names("mlp", [residual]) == BLUEPRINTS.names("mlp")
    reading = BLUEPRINTS.names("mlp", [own])
    assert widenings(own) == ("widen_quarter", "widen_half", "widen_whole")
    assert set(reading).isdisjoint(BLUEPRINTS.names("mlp"))
    assert BLUEPRINTS.names("mlp", [residual, own]) == (
        *BLUEPRINTS.names("mlp"),
        *reading,
    )


def test_a_blueprint_of_ones_own_reads_channels_last_features_and_says_where_it_does_not_fit() -> (
    None
):
    registry = BLUEPRINTS.copy()

    @registry.register(
        "cnn",
        "path",
        lambda place: 4 * place.channels,
        True,
        obstacle=lambda place: place.obstacle or None,
    )
    def path(place: Place) -> nn.Module:
        return nn.Linear(4, place.channels, bias=False)

    place = Place(
        "r2c0", 5, True, (nn.Linear(4, 3), nn.Linear(3, 5)), order=(0, 3, 1, 2)
    )
    seed = seed_of(registry.get("cnn", "path"), BlendOperator.ADD, place)
    assert seed(torch.ones(2, 6, 7, 4)).shape == (2, 6, 7, 5)
    unknown = Place("r2c1", 5, True, obstacle="add reads it")
    assert "path" in registry.names("cnn", [place])
    assert "path" not in registry.names("cnn", [unknown])
    assert registry.misfit("cnn", [unknown], "path") == "r2c1: add reads it"


def test_new_layers_are_drawn_as_the_hosts_own() -> None:
    host, _ = made("text")
    place = next(place for place in host.sites if place.name == "r1c0")
    torch.manual_seed(0)
    widened = BLUEPRINTS.get("transformer", "widen_whole").body(place)
    std = float(widened[0].weight.std())  # type: ignore[index, union-attr, operator, arg-type]
    assert math.isclose(std, 0.02, rel_tol=0.2)
    assert float(widened[0].bias.abs().max()) == 0  # type: ignore[index, union-attr, operator, arg-type]


def test_a_widening_takes_over_an_activation_of_ones_own() -> None:
    layers = (nn.Linear(5, 8), Swish(2.0), nn.Linear(8, 3))
    place = Place("r2c0", 3, True, layers)
    body = BLUEPRINTS.get("mlp", "widen_half").body(place)
    assert isinstance(body[1], Swish)  # type: ignore[index]
    assert body[1].beta == 2.0  # type: ignore[index]
    assert body[1] is not layers[1]  # type: ignore[index]
