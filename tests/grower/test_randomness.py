"""Growth draws no random numbers of the loop."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from esper.core.action import Op
from esper.core.blueprints import BLUEPRINTS
from esper.ops.torch_state import kept_generators
from esper.training.rng import SeedDraws
from tests.grower.loops import Loop, X, Y, do, net, plant, same, scores, script, weights

TRAINING = {0: plant("r0c0"), 1: do(Op.ADVANCE, "r0c0")}


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002


def test_all_generators_are_restored_also_after_an_error() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    wanted = draws()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    with pytest.raises(ZeroDivisionError), kept_generators([]):
        _ = draws()[0] / 0
    assert draws() == wanted


def drawing(model: nn.Module) -> Tensor:
    """Draws from every generator, as data loaders and augmentations do."""
    model.eval()
    draws()
    loader = DataLoader(TensorDataset(X, Y), 16, shuffle=True)
    return torch.cat([(model(x).argmax(1) == y).double() for x, y in loader])


def dropped(channels: int) -> nn.Module:
    """Dropout and a linear map."""
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(channels, channels))


@pytest.mark.parametrize(
    ("blueprint", "evaluates"), [("mlp_small", True), ("dropped", False)]
)
def test_a_loop_with_a_seed_that_only_learns_has_the_bits_of_a_loop_without_a_grower(
    blueprint: str, evaluates: bool
) -> None:
    """Whatever ``evaluate`` and the seed itself draw."""
    registry = BLUEPRINTS.copy()
    registry.register("mlp", "dropped", parameters=lambda c: c * c + c)(dropped)
    actions = {**TRAINING, 0: plant("r0c0", blueprint)}
    torch.manual_seed(3)
    one = Loop(model=net(dropout=0.5), controller=script(actions), blueprints=registry)
    torch.manual_seed(3)
    two = Loop(model=net(dropout=0.5), controller=None)
    results = []
    for loop in (one, two):
        torch.manual_seed(4), random.seed(4), np.random.seed(4)  # noqa: NPY002
        for _ in range(5):
            loop.train()
            if loop.grower is not None:
                loop.steps.append(
                    loop.grower.step(drawing if evaluates else lambda model: 0.5)
                )
        results.append((weights(loop.model), draws()))
    assert one.steps[-1].slots["r0c0"].stage == "TRAINING"
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_a_seed_that_draws_goes_on_from_pass_to_pass_and_from_a_saved_state() -> None:
    seed: Any = dropped(8)
    own = SeedDraws(seed, torch.ones(2, 8), 5)
    assert own.needed
    with own.own():
        first = torch.rand(3)
    state = own.state_dict()
    with own.own():
        second = torch.rand(3)
    assert not torch.equal(first, second)
    other = SeedDraws(seed, torch.ones(2, 8), 6)
    other.load_state_dict(state)
    with other.own():
        assert torch.equal(torch.rand(3), second)
    assert not SeedDraws(nn.Linear(8, 8), torch.ones(2, 8), 5).needed  # type: ignore[arg-type]


class Remembers(nn.Module):
    """Counts its passes in a list, and moves a plain tensor in each, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.passes: list[int] = []
        self.mean = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.passes.append(len(x))
        y = self.net(x + 0.01 * random.random())
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean  # type: ignore[no-any-return]


def test_passes_of_a_grower_leave_the_state_of_a_model_as_one_validation_does() -> None:
    results = []
    for grows in (True, False):
        model = Remembers()
        sites = {"r0c0": "net.body.0"}
        controller = script(TRAINING) if grows else None
        loop = Loop(model=model, controller=controller, sites=sites, topology=None)
        random.seed(4)
        for _ in range(5):
            loop.train()
            if grows:
                loop.steps.append(loop.grower.step(scores))
            else:
                with kept_generators():
                    scores(model)
                model.train()
        results.append((weights(model), model.passes, model.mean))
    assert loop.epoch == 5
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("merge", [False, True])
def test_a_loop_may_step_and_finish_in_inference_mode(merge: bool) -> None:
    """As the validation of Lightning runs; what was made there could not be trained."""
    actions = {0: (Op.GERMINATE, {"slot": "r0c0", "blueprint": "widen_half"})}
    arguments: dict[str, Any] = {}
    if merge:
        arguments = {
            "sites": {"r0c0": "body.0 -> body.2"},
            "controller": script(actions),
            "topology": None,
            "merge": True,
            "config": None,
        }
    found = []
    for inside in (False, True):
        loop = Loop(epochs=12, **arguments)
        with torch.inference_mode(inside):
            loop.grower.start(scores)
        for _ in range(loop.epochs):
            loop.train()
            with torch.inference_mode(inside):
                loop.grower.step(scores)
        with torch.inference_mode(inside):
            network = loop.grower.finish(merge=merge)
        loop.train()
        assert not any(p.is_inference() for p in network.parameters())
        found.append(weights(network))
    assert same(*found)
    assert len(found[0]) != len(net().state_dict()) or merge
