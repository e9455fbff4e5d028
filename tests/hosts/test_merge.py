"""Linear seeds become a part of the layer before them, and others stay."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.core.blend import Seed
from esper.core.ramps import BlendOperator
from tests.hosts.grown_modules import grown, require_same, seed_of


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("path", ["0", "1", "1.0"])
def test_a_lora_is_merged_into_the_linear_layer_before_it(
    path: str, bias: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8, bias=bias), nn.Sequential(nn.Linear(8, 8, bias=bias)), nn.ReLU()
    )
    keys, x = model.state_dict().keys(), torch.randn(5, 8)
    grown(model, path, seed_of("lora"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = esper.plain(model, x, merge=True)
    assert merged.state_dict().keys() == keys
    require_same(model, merged, x)


def test_a_linear_seed_with_a_bias_gives_the_layer_one() -> None:
    torch.manual_seed(0)
    model = grown(
        nn.Sequential(nn.Linear(8, 8, bias=False)),
        "0",
        Seed(nn.Linear(8, 8), BlendOperator.ADD, 8, "mlp"),
    )
    merged = esper.plain(model, torch.randn(3, 8), merge=True)
    assert [type(module) for module in merged.modules()] == [nn.Sequential, nn.Linear]
    require_same(model, merged, torch.randn(5, 8))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "path", "seed", "reason"),
    [
        (
            nn.Sequential(nn.Linear(8, 8)),
            "0",
            seed_of("norm"),
            "0: LayerNorm is not linear",
        ),
        (
            nn.Sequential(nn.Linear(8, 8)),
            "0",
            seed_of("lora", operator=BlendOperator.GATE),
            r"not additive \(gate\)",
        ),
        (
            nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
            "1",
            seed_of("lora"),
            "1: its output comes from a ReLU",
        ),
        (
            Tied(),
            "first",
            seed_of("lora"),
            "first: another layer uses the same weights",
        ),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
            "0",
            seed_of("lora"),
            "0: its output comes from a ParametrizedLinear",
        ),
    ],
)
def test_a_seed_that_cannot_be_merged_stays_and_is_named(
    model: nn.Module, path: str, seed: Seed, reason: str
) -> None:
    network = grown(model, path, seed)
    with pytest.warns(UserWarning, match=reason):
        copy = esper.plain(network, torch.randn(3, 8), merge=True)
    assert any(module._forward_hooks for module in copy.modules())
    require_same(network, copy, torch.randn(3, 8))


class TiedByAFunction(nn.Module):
    """The output layer uses a layer's weights by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.side(self.up(x))) @ self.up.weight  # type: ignore[no-any-return]


def test_a_layer_whose_weights_a_function_uses_stays_and_others_are_merged() -> None:
    torch.manual_seed(0)
    network = grown(
        grown(TiedByAFunction(), "up", seed_of("lora")), "side", seed_of("lora")
    )
    with pytest.warns(
        UserWarning, match="up: something else uses the weights of its layer"
    ):
        plain: Any = esper.plain(network, torch.randn(3, 8), merge=True)
    assert [bool(layer._forward_hooks) for layer in (plain.up, plain.side)] == [
        True,
        False,
    ]
    assert torch.equal(plain.up.weight, network.get_parameter("up.weight"))
    require_same(network, plain, torch.randn(5, 8))


class HalfInside(nn.Module):
    """Layers in half precision whose result is returned in float32, as logits often are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.bfloat16()).float() * 4  # type: ignore[no-any-return]


def test_rounding_of_layers_in_half_precision_does_not_undo_a_merge() -> None:
    torch.manual_seed(0)
    network = grown(HalfInside(), "layers.1", seed_of("lora", width=32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = esper.plain(network, torch.randn(16, 32), merge=True)
    assert merged.state_dict().keys() == HalfInside().state_dict().keys()


@pytest.mark.parametrize(
    ("first", "second"), [("lora", "mlp_small"), ("mlp_small", "lora")]
)
def test_of_two_seeds_on_one_layer_only_the_one_next_to_it_is_merged(
    first: str, second: str
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    for name in (first, second):
        grown(network, "0", seed_of(name))
    with pytest.warns(UserWarning, match="these seeds are not merged"):
        plain = esper.plain(network, torch.randn(16, 8), merge=True)
    assert len(plain[0]._forward_hooks) == (1 if first == "lora" else 2)  # type: ignore[index]
    require_same(network, plain, torch.randn(5, 8))


def test_a_merge_that_is_undone_keeps_the_order_of_seeds() -> None:
    """The first seed is linear, but something else uses its layer's weights; the second is not linear."""
    torch.manual_seed(0)
    network = TiedByAFunction()
    for name in ("lora", "mlp_small"):
        grown(network, "up", seed_of(name))
    with pytest.warns(UserWarning, match="these seeds are not merged"):
        plain = esper.plain(network, torch.randn(16, 8), merge=True)
    require_same(network, plain, torch.randn(5, 8))
