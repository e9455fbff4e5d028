"""Schedules see the host's groups only, during growth, after it, and through a resume."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr

from esper.config import ConfigError
from esper.grower.schedules import (
    SLOT,
    HostGroups,
    host_groups,
    in_order,
    show_host_groups,
)
from tests.grower.loops import Loop, net, same, weights
from tests.selection import slow_except

SCHEDULES: dict[str, Any] = {
    "cosine": lambda o: lr.CosineAnnealingLR(o, 60),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.2, 100),
    "lambda": lambda o: lr.LambdaLR(o, [lambda t: 0.99**t]),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, [lambda t: 0.99]),
    "cyclic": lambda o: lr.CyclicLR(o, [0.01], [0.1], step_size_up=3),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 7),
    "chained": lambda o: lr.ChainedScheduler(
        [lr.LinearLR(o, 0.1, total_iters=4), lr.ExponentialLR(o, 0.99)]
    ),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.99)], [5]
    ),
    "polynomial": lambda o: lr.PolynomialLR(o, 80),
}


def rates(loop: Loop) -> list[float]:
    return [group["lr"] for group in loop.optimizer.param_groups]


EACH_ONCE = [(name, number % 2 == 0) for number, name in enumerate(SCHEDULES)]


@pytest.mark.parametrize(
    ("name", "passed"),
    slow_except(
        EACH_ONCE, [(name, passed) for name in SCHEDULES for passed in (True, False)]
    ),
)
def test_a_schedule_goes_on_as_without_seeds_and_kept_seeds_follow(
    name: str, passed: bool
) -> None:
    arguments = {} if passed else {"scheduler": ()}  # then it is found
    grown = Loop(make_scheduler=SCHEDULES[name], **arguments)
    alone = Loop(make_scheduler=SCHEDULES[name], controller=None)
    for _ in range(grown.epochs):
        grown.run(1), alone.run(1)
        assert rates(grown)[0] == rates(alone)[0]
    assert grown.grower is not None
    grown.grower.finish()
    for _ in range(3):
        grown.train(), alone.train()
        assert rates(grown) == [rates(alone)[0]] * 2


@pytest.mark.parametrize("cut", [2, 6, 12])
def test_a_resumed_schedule_continues_to_the_same_bits(cut: int) -> None:
    whole, first, second = (
        Loop(make_scheduler=SCHEDULES["one cycle"]) for _ in range(3)
    )
    whole.run(), first.run(cut)
    parts: Any = ("model", "grower", "optimizer", "scheduler")
    for name in parts:
        getattr(second, name).load_state_dict(
            copy.deepcopy(getattr(first, name).state_dict())
        )
    second.epoch = cut
    second.run()
    assert same(weights(whole.model), weights(second.model))
    assert rates(whole) == rates(second)


class Own:
    """A schedule that is none of torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.base, self.epoch = (
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            0,
        )

    def step(self) -> None:
        self.epoch += 1
        for index, group in enumerate(self.optimizer.param_groups):
            group["lr"] = self.base[index] * 0.99**self.epoch


def test_a_schedule_of_the_users_own_class_goes_on() -> None:
    loop = Loop(make_scheduler=Own).run()
    assert loop.grower is not None
    loop.grower.finish()
    loop.train()
    assert (
        rates(loop)[0]
        == rates(loop)[1]
        == pytest.approx(0.1 * 0.99 ** (4 * 15), rel=1e-2)
    )


def test_what_is_no_schedule_of_the_optimizer_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        ConfigError, match=r"scheduler= is a function.*if \"slot\" not in g"
    ):
        Loop(scheduler=lambda epoch: 0.1)
    other = torch.optim.SGD(net().parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"whose \.optimizer is not the optimizer"):
        Loop(scheduler=lr.ConstantLR(other))


class Trainer:
    """Has an optimizer and a step, and is no schedule."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer, self.losses = model, optimizer, [0.0]

    def step(self) -> None:
        self.optimizer.step()


def test_a_trainer_keeps_its_optimizer() -> None:
    loop = Loop()
    trainer = Trainer(loop.model, loop.optimizer)
    show_host_groups(loop.optimizer)
    assert trainer.optimizer is loop.optimizer


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))]
)
def test_a_view_survives_copies(copied: Any) -> None:
    optimizer = torch.optim.SGD(net().parameters(), 0.1)
    optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.zeros(1))], SLOT: "r0c0"}
    )
    view = copied(HostGroups(optimizer))
    assert len(view.param_groups) == 1
    assert len(host_groups(view.whole)) == 1
    assert view.defaults == optimizer.defaults
    assert HostGroups(optimizer) == optimizer


def test_a_saved_state_is_put_in_the_order_of_the_groups() -> None:
    optimizer = torch.optim.SGD(net().parameters(), 0.1)
    for slot in (None, "r0c1", "r0c0"):
        group: dict[str, Any] = {"params": [torch.nn.Parameter(torch.zeros(1))]}
        optimizer.add_param_group(group if slot is None else {**group, SLOT: slot})
    state = optimizer.state_dict()
    assert in_order(optimizer, state) is None
    mixed = {**state, "param_groups": [state["param_groups"][i] for i in (2, 0, 3, 1)]}
    assert in_order(optimizer, mixed) == state
    fewer = {**state, "param_groups": state["param_groups"][:3]}
    with pytest.raises(
        ConfigError,
        match="has seeds in r0c1, and the optimizer has seeds in r0c0, r0c1",
    ):
        in_order(optimizer, fewer)
