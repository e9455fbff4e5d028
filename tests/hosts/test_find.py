"""`find_sites`: what can grow in a model, where, and at which price."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import esper
from esper.config import ConfigError
from esper.core.blend import Seed
from esper.core.blueprints import BLUEPRINTS
from esper.hosts.find import (
    MOST,
    FoundSite,
    SeedPrice,
    chosen_sites,
    find_sites,
    table_of,
)
from tests.grower.loops import same, weights
from tests.hosts.layout_models import made


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        ),
        nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )


IMAGES = torch.randn(4, 1, 8, 8)


class Attention(nn.Module):
    """A projection to queries, keys and values, and one back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.back = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.back(F.scaled_dot_product_attention(q, k, v))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h)  # type: ignore[no-any-return]


TOKENS = torch.randint(0, 11, (3, 7))


def paths(found: list[FoundSite], kind: str) -> list[str]:
    return [site.path for site in found if site.kind == kind]


def test_blocks_and_widenings_of_a_cnn_are_found_in_the_order_of_a_pass() -> None:
    found = find_sites(cnn(), IMAGES)
    assert [(site.path, site.kind) for site in found] == [
        ("0.2", "residual"),
        ("0", "residual"),
        ("0.0 -> 1.0", "widen"),
        ("1", "residual"),
        ("1.0 -> 2.2", "widen"),
    ]
    by_path = {site.path: site for site in found}
    assert (by_path["0"].layout, by_path["0"].width, by_path["0"].shape) == (
        "[N, C, H, W]",
        4,
        (4, 4, 4, 4),
    )
    assert (by_path["1.0 -> 2.2"].layout, by_path["1.0 -> 2.2"].width) == (
        "[N, D]",
        8,
    )  # the units that it has
    assert [site.merges for site in found] == [False, False, True, False, True]


def test_blocks_widenings_and_loras_of_a_transformer_are_found() -> None:
    found = find_sites(Transformer(), TOKENS)
    assert paths(found, "residual") == ["blocks.0", "blocks.1", "blocks.2"]
    assert paths(found, "widen") == [
        f"blocks.{n}.up -> blocks.{n}.down" for n in range(3)
    ]
    lora = [
        f"blocks.{n}.attention.{name} -> blocks.{n}.attention.{name}"
        for n in range(3)
        for name in ("qkv", "back")
    ]
    assert paths(found, "lora") == lora


def test_the_prices_are_those_of_the_seeds() -> None:
    model = cnn()
    for site in find_sites(model, IMAGES):
        for name, price in site.blueprints.items():
            recipe = BLUEPRINTS.get(site.topology, name)
            if not recipe.only_added:
                assert price.parameters == recipe.parameters(site.width)
    found = {site.path: site for site in find_sites(model, IMAGES)}
    assert found["0"].blueprints["conv_light"].flops == 2 * 9 * 4 * 4 * 4 * 4
    whole = found["0.0 -> 1.0"].blueprints["widen_whole"]
    assert whole == SeedPrice(
        parameters=4 * 9 + 4 + 2 * 4 + 8 * 4 * 9,
        flops=2 * (4 * 9 * 64 + 8 * 4 * 9 * 16),
        units=8,
    )


def test_the_model_stays_as_it_is() -> None:
    model = cnn().train()
    before, state = weights(model), torch.random.get_rng_state()
    find_sites(model, IMAGES)
    assert model.training
    assert same(weights(model), before)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )
    assert not any(isinstance(module, Seed) for module in model.modules())


class Shared(nn.Module):
    """A layer that runs twice, and one whose units something else reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(self.twice(self.twice(x))))
        return self.second(h) + h.mean(1, keepdim=True)  # type: ignore[no-any-return]


def test_a_block_that_runs_twice_is_a_place_for_growers_and_its_layers_are_not() -> (
    None
):
    model, x = Shared(), torch.randn(4, 8)
    assert [(site.path, site.kind, site.runs) for site in find_sites(model, x)] == [
        ("twice", "residual", 2)
    ]
    assert chosen_sites(model, x) == {"r0c0": "twice"}
    with pytest.raises(esper.ConfigError, match="finds no place in the model"):
        esper.graft(model, "auto", example=x)


class Halves(nn.Module):
    """A block that runs twice, for features of two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(F.max_pool2d(self.block(x), 2)).mean((2, 3))  # type: ignore[no-any-return]


def test_a_block_that_returns_several_shapes_is_no_place() -> None:
    assert paths(find_sites(Halves(), torch.randn(3, 4, 8, 8)), "residual") == []


class Tied(nn.Module):
    """Two layers with one weight: a wider one would change the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(x) + self.second(F.relu(self.first(x)))  # type: ignore[no-any-return]


def test_a_widening_that_does_not_merge_is_left_out() -> None:
    assert paths(find_sites(Tied(), torch.randn(4, 8)), "widen") == []


@pytest.mark.parametrize("computed", [weight_norm, spectral_norm, orthogonal])
def test_what_computes_the_weights_of_a_layer_is_no_site(
    computed: Callable[[nn.Module], nn.Module],
) -> None:
    model = nn.Sequential(computed(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3))
    assert [site.path for site in find_sites(model, torch.randn(4, 8))] == ["1"]
    for path in ("0.parametrizations.weight", "0.parametrizations.weight.0"):
        with pytest.raises(
            ConfigError, match="weight_norm does: name the layer itself"
        ):
            esper.graft(model, [path])


@pytest.mark.parametrize(
    "name", ["channels last", "causal", "time first", "nodes of a graph"]
)
def test_a_site_of_every_layout_is_found(name: str) -> None:
    model, case = made(name)
    found = {site.path: site.topology for site in find_sites(model, case.inputs(5))}
    shared = [
        (path, topology)
        for path, (topology, _) in zip(case.sites, case.found, strict=True)
        if path in found
    ]
    assert [(path, found[path]) for path, _ in shared] == shared
    if name != "nodes of a graph":
        assert shared


def test_automatic_sites_are_all_widenings_and_a_block_of_each_stage() -> None:
    assert chosen_sites(cnn(), IMAGES) == {
        "r2c0": "0.0 -> 1.0",
        "r2c1": "1.0 -> 2.2",
    }
    assert chosen_sites(Transformer(), TOKENS) == {
        "r2c0": "blocks.0.up -> blocks.0.down",
        "r2c1": "blocks.1.up -> blocks.1.down",
        "r2c2": "blocks.2.up -> blocks.2.down",
        "r0c0": "blocks.2",
    }


def test_automatic_sites_are_few_and_none_lies_within_a_widening() -> None:
    layers: list[nn.Module] = []
    for width in range(4, 24):
        layers += [nn.Linear(width, width + 1), nn.ReLU()]
    found = chosen_sites(nn.Sequential(*layers, nn.Linear(24, 2)), torch.randn(3, 4))
    assert len(found) == MOST
    widened = [
        tuple(map(int, path.split(" -> "))) for path in found.values() if "->" in path
    ]
    others = [int(path) for path in found.values() if "->" not in path]
    assert len(widened) == len(others) == MOST // 2
    assert not [
        at for at in others if any(first <= at < last for first, last in widened)
    ]


def test_a_graft_and_a_grower_take_lists_and_automatic_sites() -> None:
    host = esper.graft(cnn(), ["0", "1", "0.0 -> 1.0"], example=IMAGES)
    assert host.paths == {"r0c0": "0", "r0c1": "1", "r2c0": "0.0 -> 1.0"}
    host = esper.graft(cnn(), "auto", example=IMAGES)
    assert host.paths == chosen_sites(cnn(), IMAGES)
    model = cnn()
    grower = esper.Grower(
        model, "auto", torch.optim.SGD(model.parameters(), 0.1), example=IMAGES
    )
    assert {name: str(path) for name, path in grower.paths.items()} == host.paths
    grower.close()


@pytest.mark.parametrize(
    ("sites", "reason"), [("auto", "needs example="), ("0", "must be 'auto', a list")]
)
def test_a_text_other_than_auto_or_without_an_example_is_refused(
    sites: str, reason: str
) -> None:
    with pytest.raises(esper.ConfigError, match=reason):
        esper.graft(cnn(), sites)


def test_a_site_is_json_and_a_table_for_people() -> None:
    found = find_sites(cnn(), IMAGES)
    read = json.loads(json.dumps([site.plain() for site in found]))
    assert read[0]["path"] == "0.2"
    assert read[2]["blueprints"]["widen_whole"]["parameters"] == 336
    lines = table_of(found)
    assert lines[0].split()[:2] == ["site", "kind"]
    assert any(
        line.startswith("0.0 -> 1.0  widen") and line.endswith("yes") for line in lines
    )
    assert len({len(line.split("  ")[0]) for line in lines}) > 0


def losses(model: nn.Module) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Of two batches of images with labels."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(64, 1, 8, 8, generator=draws)
    y = torch.randint(0, 10, (64,), generator=draws)

    def loss(part: slice) -> Tensor:
        return F.cross_entropy(model(x[part]), y[part])

    return lambda: loss(slice(0, 32)), lambda: loss(slice(32, 64))


def test_sites_with_the_largest_need_come_first() -> None:
    model = cnn()
    before = weights(model)
    generator = torch.get_rng_state()
    found = find_sites(model, IMAGES, need=losses(model))
    kinds = [site.kind for site in found]
    assert kinds == ["widen", "widen", "residual", "residual", "residual"]
    first, second, *others = (site.need for site in found)
    assert first > second > 0
    assert others == [None] * 3
    assert {site.path for site in found} == {
        site.path for site in find_sites(model, IMAGES)
    }
    heads, row, *_ = str(found).splitlines()
    assert heads.endswith("need")
    assert row.endswith(f"{first:.3g}")
    assert same(before, weights(model))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())


def test_loras_of_a_frozen_model_have_a_need() -> None:
    model = Transformer().requires_grad_(False)
    y = torch.randint(0, 11, TOKENS.shape)

    def loss() -> Tensor:
        return F.cross_entropy(model(TOKENS).flatten(0, 1), y.flatten())

    found = find_sites(model, TOKENS, need=(loss, loss))
    assert all(site.need is not None for site in found if site.kind == "lora")
    assert not any(p.requires_grad for p in model.parameters())


def test_losses_without_the_model_are_an_error() -> None:
    with pytest.raises(ConfigError, match="took no part"):
        find_sites(cnn(), IMAGES, need=(lambda: torch.ones(()), lambda: torch.ones(())))
