"""Linear seeds become a part of the layer before them, and others stay."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.lifecycle.ramps import BlendOperator
from esper.seeds.blend import Seed
from tests.hosts.grown_modules import grown, require_same, seed_of


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("path", ["0", "1", "1.0"])
def test_a_lora_is_merged_into_the_linear_layer_before_it(path: str, bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Sequential(nn.Linear(8, 8, bias=bias)), nn.ReLU())
    keys, x = model.state_dict().keys(), torch.randn(5, 8)
    grown(model, path, seed_of("lora"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = esper.plain(model, x, merge=True)
    assert merged.state_dict().keys() == keys
    require_same(model, merged, x)


def test_a_linear_seed_with_a_bias_gives_the_layer_one() -> None:
    torch.manual_seed(0)
    model = grown(nn.Sequential(nn.Linear(8, 8, bias=False)), "0", Seed(nn.Linear(8, 8), BlendOperator.ADD, 8, "mlp"))
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
        (nn.Sequential(nn.Linear(8, 8)), "0", seed_of("norm"), "0: LayerNorm is not linear"),
        (nn.Sequential(nn.Linear(8, 8)), "0", seed_of("lora", operator=BlendOperator.GATE), r"not additive \(gate\)"),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "1", seed_of("lora"), "1: its output comes from a ReLU"),
        (Tied(), "first", seed_of("lora"), "first: another layer uses the same weights"),
    ],
)
def test_a_seed_that_cannot_be_merged_stays_and_is_named(model: nn.Module, path: str, seed: Seed, reason: str) -> None:
    network = grown(model, path, seed)
    with pytest.warns(UserWarning, match=reason):
        copy = esper.plain(network, torch.randn(3, 8), merge=True)
    assert "Grown" in {type(module).__name__ for module in copy.modules()}
    require_same(network, copy, torch.randn(3, 8))
