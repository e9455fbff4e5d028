"""Optimizers take what those of torch take: any form of parameters, and groups that schedules and callers write to."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from esper.ops.optimizer import SGD, AdamW, FusedOptimizer
from tests.ops.test_optimizer import assert_same, equal, set_gradients

BOTH = pytest.mark.parametrize("kind", [SGD, AdamW])
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=6),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.3, 2),
    "in order": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.StepLR(o, 1)], [2]
    ),
}


def two_shapes() -> list[nn.Parameter]:
    """A parameter of each of AdamW's groups."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (5,))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def assert_steps_as_torch(
    kind: type[FusedOptimizer],
    change: Callable[[Any], Any],
    options: dict[str, Any],
    after: Callable[[Any, Any], None],
) -> None:
    """Steps Esper's optimizer and torch's, which are made by ``change``, and compares parameters and rates."""
    mine, theirs = two_shapes(), two_shapes()
    own = kind([{"params": [p]} for p in mine], **options)
    make = torch.optim.AdamW if kind is AdamW else torch.optim.SGD
    other = make([{"params": [p]} for p in theirs], **options)
    changes = change(own), change(other)
    for step in range(5):
        set_gradients(mine, 5 * step + 1)
        set_gradients(theirs, 5 * step + 1)
        own.step()
        other.step()
        after(*changes)
        rates = [
            [float(group["lr"]) for group in optimizer.param_groups]
            for optimizer in (own, other)
        ]
        assert rates[0] == pytest.approx(rates[1], rel=1e-9, abs=1e-12)
    assert_same(mine, theirs)


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_acts_once_on_each_group(
    kind: type[FusedOptimizer], schedule: str
) -> None:
    options: dict[str, Any] = {"lr": 0.2}
    if kind is SGD:
        options["momentum"] = 0.9
    assert_steps_as_torch(
        kind,
        SCHEDULES[schedule],
        options,
        lambda mine, theirs: (mine.step(), theirs.step()),
    )


@BOTH
@pytest.mark.parametrize("start", [0.1, torch.tensor(0.1), 1])
def test_rates_written_by_hand_are_read_by_the_next_step(
    kind: type[FusedOptimizer], start: float | Tensor
) -> None:
    def write(*optimizers: Any) -> None:
        for optimizer in optimizers:
            for factor, group in enumerate(optimizer.param_groups, 1):
                group["lr"] = float(group["lr"]) * 0.5 * factor

    options = {"lr": float(start)}
    assert_steps_as_torch(kind, lambda optimizer: optimizer, options, write)
    optimizer = kind(two_shapes(), lr=start)
    assert all(group["lr"] == float(start) for group in optimizer.param_groups)


@BOTH
def test_groups_have_options_of_their_own(kind: type[FusedOptimizer]) -> None:
    def write(*optimizers: Any) -> None:
        for optimizer in optimizers:
            for place, group in enumerate(optimizer.param_groups):
                if kind is SGD:
                    group["momentum"] = 0.9 * place
                else:
                    group["betas"] = (0.5 + 0.2 * place, 0.9)

    assert_steps_as_torch(kind, lambda optimizer: optimizer, {"lr": 0.1}, write)


def test_each_group_owns_its_rate() -> None:
    rate = torch.tensor(0.5)
    optimizers = [SGD(two_shapes(), rate), AdamW(two_shapes(), rate)]
    for optimizer in optimizers:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    rates = [
        group["lr"] for optimizer in optimizers for group in optimizer.param_groups
    ]
    assert len({id(each) for each in (rate, *rates)}) == 1 + len(rates)


@BOTH
@pytest.mark.parametrize(
    "given",
    [
        lambda net: net.parameters(),
        lambda net: net.named_parameters(),
        lambda net: filter(lambda p: True, net.parameters()),
        lambda net: [{"params": net.parameters()}],
        lambda net: ({"params": [p], "lr": 0.1} for p in net.parameters()),
        lambda net: list(net.parameters()),
    ],
)
def test_every_parameter_that_is_given_learns(
    kind: type[FusedOptimizer], given: Callable[[nn.Module], Any]
) -> None:
    net = nn.Linear(3, 2)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = kind(given(net), lr=0.1)
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    for parameter, old in zip(net.parameters(), before, strict=True):
        assert not torch.equal(parameter, old)


@BOTH
def test_named_parameters_keep_their_names(kind: type[FusedOptimizer]) -> None:
    for net in (nn.Linear(3, 2), nn.Linear(3, 2, bias=False)):
        optimizer = kind(net.named_parameters(), lr=0.1)
        names = [
            name for group in optimizer.param_groups for name in group["param_names"]
        ]
        assert names == [name for name, _ in net.named_parameters()]


def test_groups_that_are_dicts_decay_as_they_say() -> None:
    weight, bias = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    groups = [{"params": [weight], "weight_decay": 0.0}, {"params": [bias]}]
    optimizer = AdamW(groups, lr=0.1, weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5]


@BOTH
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_copies_and_pickles_go_on_as_the_original(
    kind: type[FusedOptimizer], copied: Callable[[Any], Any]
) -> None:
    params = two_shapes()
    optimizer = kind(params, lr=0.1)
    set_gradients(params, 1)
    optimizer.step()
    other = copied(optimizer)
    others = [p for group in other.param_groups for p in group["params"]]
    for one, theirs in ((params, optimizer), (others, other)):
        set_gradients(one, 2)
        schedule = lr_scheduler.ExponentialLR(theirs, 0.5)
        theirs.step()
        schedule.step()
    assert equal(params, others)
    assert [float(g["lr"]) for g in other.param_groups] == [
        float(g["lr"]) for g in optimizer.param_groups
    ]


@BOTH
def test_options_that_only_torchs_optimizer_has_are_refused_wherever_they_come_from(
    kind: type[FusedOptimizer],
) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match="got maximize=True"):
        kind([weight], maximize=True)
    with pytest.raises(ValueError, match="got maximize=True"):
        kind([{"params": [weight], "maximize": True}])
    optimizer = kind([weight])
    with pytest.raises(ValueError, match="weight_decay must not be negative, got -1"):
        optimizer.add_param_group({"params": two_shapes(), "weight_decay": -1.0})
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match="got maximize=True"):
        optimizer.step()
    assert bool((weight == 1).all())
    with pytest.raises(TypeError, match="unknown option 'beta'; known: "):
        kind([weight], beta=1)
    with pytest.raises(ValueError, match=r"got a parameter of torch\.float16"):
        kind([nn.Parameter(torch.ones(2, dtype=torch.float16))])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
def test_a_parameter_that_is_given_twice_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="in one group twice"):
        SGD([weight, weight])


def test_arguments_by_position_are_those_of_torch() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    mine = SGD([weight], 0.1, 0.9, 0, 5e-4, True).param_groups[0]
    theirs = torch.optim.SGD([weight], 0.1, 0.9, 0, 5e-4, True).param_groups[0]
    for name in ("momentum", "dampening", "weight_decay", "nesterov"):
        assert mine[name] == theirs[name]
    with pytest.raises(
        ValueError, match=r"got dampening=0\.5, and Esper's SGD only does"
    ):
        SGD([weight], 0.1, 0.9, 0.5)


@BOTH
def test_sparse_gradients_are_refused(kind: Any) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = kind(table.parameters(), 0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
