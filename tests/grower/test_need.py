"""Need of a model in a user's loop: that of a host in training, without a trace in the loop."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from esper.config import ConfigError
from esper.grower.grower import Grower
from tests.grower.loops import same, weights


class Loop:
    """A narrow network with dropout that two widenings and an output site could grow."""

    def __init__(self, controller: str = "none", threshold: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 3),
            nn.BatchNorm1d(3),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(3, 6),
            nn.ReLU(),
            nn.Linear(6, 4),
        )
        self.x = torch.randn(256, 8)
        self.y = (self.x[:, :4] * self.x[:, 4:]).argmax(1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.grower = Grower(
            self.model,
            {"r0c0": "0 -> 4", "r0c1": "4 -> 6", "r0c2": "5"},
            self.optimizer,
            controller,
            8,
            example=self.x[:4],
            classes=4,
            config={"need": {"threshold": threshold}},
        )

    def loss(self, part: slice) -> Tensor:
        return functional.cross_entropy(self.model(self.x[part]), self.y[part])

    def epoch(self) -> None:
        self.model.train()
        for first in range(0, 256, 64):
            self.optimizer.zero_grad()
            self.loss(slice(first, first + 64)).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def measure(self) -> dict[str, float]:
        return self.grower.measure_need(
            lambda: self.loss(slice(0, 128)), lambda: self.loss(slice(128, 256))
        )

    def evaluate(self, model: nn.Module) -> Any:
        return (model.eval()(self.x).argmax(1) == self.y).float()


def test_each_widening_site_has_a_need_that_is_below_the_loss_of_a_guess() -> None:
    loop = Loop()
    loop.epoch()
    needs = loop.measure()
    assert needs.keys() == {"r0c0", "r0c1"}, "the output of a layer is no such site"
    assert all(0 < need < 2 for need in needs.values())


def test_a_model_in_which_nothing_is_left_to_learn_needs_nearly_nothing() -> None:
    loop = Loop()
    loop.epoch()
    before = loop.measure()
    with (
        torch.no_grad()
    ):  # the logits are nearly those of the labels, whatever comes before
        loop.y[:] = 0
        loop.model[-1].bias.copy_(torch.tensor([20.0, 0, 0, 0]))  # type: ignore[union-attr, operator]
    assert max(loop.measure().values()) < 1e-3 < min(before.values())


def test_measuring_changes_no_bit_of_the_loop() -> None:
    loops = Loop(), Loop()
    for number, loop in enumerate(loops):
        torch.manual_seed(1)
        for _ in range(3):
            loop.epoch()
            if number:
                loop.measure()
            loop.grower.step(loop.evaluate)
    alone, measured = loops
    assert same(weights(alone.model), weights(measured.model))
    assert all(p.grad is not None for p in measured.model.parameters())


def test_a_controller_sees_it_and_the_rule_need_plants_by_it() -> None:
    loop = Loop()
    loop.epoch()
    needs = loop.measure()
    loop.grower.step(loop.evaluate)
    assert loop.grower.env is not None
    seen = loop.grower.env.state.slots.need[0, :2].tolist()
    assert seen == pytest.approx([needs["r0c0"], needs["r0c1"]])

    between = sum(seen) / 2 / math.log(4)
    loop = Loop("need", between)
    loop.epoch()
    loop.measure()
    step = loop.grower.step(loop.evaluate)
    largest = max(needs, key=needs.__getitem__)
    grown = {name for name, slot in step.slots.items() if slot.stage == "FOSSILIZED"}
    assert grown == {largest}


def test_the_rule_need_says_what_to_call_if_nothing_was_measured() -> None:
    loop = Loop("need")
    loop.epoch()
    with pytest.raises(ConfigError, match=r"grower\.measure_need\(\) before step\(\)"):
        loop.grower.step(loop.evaluate)


def test_a_loss_of_another_model_is_an_error() -> None:
    loop = Loop()
    loop.epoch()
    other = copy.deepcopy(loop.model)

    def loss() -> Tensor:
        return functional.cross_entropy(other(loop.x), loop.y)

    with pytest.raises(ConfigError, match="took no part in one of them"):
        loop.grower.measure_need(loss, loss)
