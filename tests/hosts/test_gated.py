"""Gated feed-forward modules are widened as a whole, whatever their activation and the names of their layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.hosts.gated import gated_of
from tests.grower.loops import LENIENT, plant, script

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Swish(nn.Module):
    """Llama's form, with an activation that is no module, and dropout."""

    def __init__(self, units: int = 10, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(6, units, bias), nn.Linear(6, units, bias)
        self.w2, self.drop = nn.Linear(units, 6, bias), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.drop(F.silu(self.w1(x)) * self.w3(x)))  # type: ignore[no-any-return]


class Chain(Swish):
    """Three layers in a row."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w3(self.w2(F.relu(self.w1(x))))  # type: ignore[no-any-return]


class Normed(Swish):
    """Units that depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.softmax(self.w1(x), -1) * self.w3(x))  # type: ignore[no-any-return]


class Network(nn.Module):
    def __init__(self, gated: nn.Module) -> None:
        super().__init__()
        self.gated, self.head = gated, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gated(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [False, True])
def test_more_units_are_those_of_a_wider_module(bias: bool) -> None:
    torch.manual_seed(0)
    module = Swish(bias=bias).double().eval()
    alone = copy.deepcopy(module)
    gated = gated_of(module)
    assert gated is not None
    assert (gated.units, gated.writers, gated.reader) == (10, ("w1", "w3"), "w2")
    more = gated.more(3).double().eval()
    more.project.register_parameter("bias", None)
    x = X.double()
    wanted = module(x) + 0.5 * more(x)
    gated.absorb(more, 0.5)
    torch.testing.assert_close(module(x), wanted)
    assert (gated.units, module.w1.out_features, module.w2.in_features) == (13, 13, 13)
    assert isinstance(more.get_submodule("body"), Swish)
    assert torch.equal(module.w1.weight[:10], alone.w1.weight)


@pytest.mark.parametrize(
    "module",
    [Chain(), Normed(), nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))],
)
def test_other_modules_are_none(module: nn.Module) -> None:
    assert gated_of(module) is None


def test_looking_changes_neither_the_module_nor_random_numbers() -> None:
    module = Swish().train()
    state, weights = torch.get_rng_state(), copy.deepcopy(module.state_dict())
    module.w1.register_forward_hook(
        lambda *_: pytest.fail("a hook of the module was called")
    )
    gated = gated_of(module)
    assert gated is not None
    assert torch.equal(torch.get_rng_state(), state)
    gated.more(2).eval()
    assert module.drop.training
    assert all(
        torch.equal(value, weights[name]) for name, value in module.state_dict().items()
    )


def test_a_gated_module_is_found_widened_and_merged_in_a_loop() -> None:
    torch.manual_seed(0)
    model = Network(Swish())
    (site,) = [each for each in esper.find_sites(model, X) if each.kind == "widen"]
    assert (site.path, site.width, site.merges) == ("gated -> gated", 10, True)
    assert site.blueprints["widen_half"].parameters == 5 * 6 * 3
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = LENIENT.with_values(env={"at_once": True})
    controller = script({0: plant("r2c0", "widen_half")})
    grower = esper.Grower(
        model, [site.path], optimizer, controller, horizon=4, example=X, config=config
    )
    before = model.eval()(X)

    def evaluate(network: nn.Module) -> float:
        network.eval()(X)
        return 0.5

    grower.start(evaluate)
    assert torch.equal(model.eval()(X), before)
    model.train()
    model(X).square().mean().backward()
    optimizer.step()
    grower.step(evaluate)
    grown = model.eval()(X)
    assert not torch.equal(grown, before)
    grower.finish(merge=True)
    torch.testing.assert_close(model(X), grown)
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in Network(Swish(15)).parameters()
    )
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters()
    }
    assert all("exp_avg" in optimizer.state[p] for p in model.parameters())
