"""Grown submodules of an ordinary network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.hosts.grown_module import GrownModule, grown_in_place
from esper.lifecycle.ramps import BlendOperator
from esper.seeds.blend import Seed


def doubled() -> Seed:
    """A seed whose delta is twice its features."""
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.bias)
    with torch.no_grad():
        layer.weight.copy_(2 * torch.eye(4))
    return Seed(layer, BlendOperator.ADD, 4, "mlp")


class Pair(nn.Module):
    def forward(self, x: Tensor, *, shift: float = 0.0) -> tuple[Tensor, str]:
        return x + shift, "state"


def test_a_grown_module_adds_its_share_of_the_delta() -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(GrownModule(nn.Identity(), doubled(), 0.5)(x), 2 * x)


def test_only_the_first_tensor_of_a_tuple_grows_and_arguments_are_passed_on() -> None:
    x = torch.randn(3, 4)
    h, state = GrownModule(Pair(), doubled(), 0.25)(x, shift=1.0)
    torch.testing.assert_close(h, 1.5 * (x + 1))
    assert state == "state"


def test_nested_submodules_both_grow() -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity()))
    grown_in_place(model, {"0": (doubled(), 1.0), "0.0": (doubled(), 0.5)})
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), 3 * 2 * x)


def test_a_grown_submodule_keeps_its_mode_and_its_seed_trains() -> None:
    model: Any = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].eval()
    seeds = [doubled().requires_grad_(False) for _ in range(2)]
    grown_in_place(model, {"0": (seeds[0], 1.0), "1": (seeds[1], 1.0)})
    assert [module.training for module in model] == [seed.training for seed in seeds] == [False, True]
    assert all(parameter.requires_grad for parameter in model.parameters())
