"""The common part of fused optimizers, none of which imports a compiler: that takes a second and 70 MB."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.ops.adamw import AdamW
from esper.ops.grad_stats import grad_stats
from esper.ops.optimizer import Adam, FusedOptimizer, step_all
from esper.ops.sgd import SGD
from tests.ops.test_adamw import draw, reference, values_of
from tests.ops.test_sgd import assert_same, parameters, set_gradients

Make = Callable[[list[nn.Parameter]], FusedOptimizer]
MAKERS: dict[
    str, tuple[Make, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]
] = {
    "sgd": (
        lambda params: SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ),
    "sgd without momentum": (
        lambda params: SGD(params, lr=0.1, weight_decay=0.01),
        lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.01),
    ),
    "adamw": (
        lambda params: AdamW(params, torch.tensor(0.01), weight_decay=0.1),
        lambda params: reference(params),
    ),
}
each = pytest.mark.parametrize("kind", MAKERS)

SCRIPT = """
import sys

import torch

from esper.ops.adamw import AdamW
from esper.ops.optimizer import Adam
from esper.ops.sgd import SGD

for make in (Adam, SGD, AdamW):
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = make([weight], torch.tensor(0.1))
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
"""
OF_TORCH = """
import sys

import torch

torch.optim.SGD([torch.nn.Parameter(torch.ones(3, 3))])
assert "torch._dynamo" in sys.modules, "torch does not import it either: LightOptimizer can go"
"""


def test_making_stepping_and_saving_them_imports_no_compiler() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def test_adam_steps_as_that_of_torch() -> None:
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2)]
    optimizers = [
        make([weight], lr=0.1)
        for make, weight in zip((Adam, torch.optim.Adam), weights, strict=True)
    ]
    for _ in range(3):
        for optimizer, weight in zip(optimizers, weights, strict=True):
            optimizer.zero_grad()
            (weight**2).sum().backward()
            optimizer.step()
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.linspace(-1, 1, 12))


@pytest.mark.slow
def test_optimizers_of_torch_do() -> None:
    subprocess.run([sys.executable, "-c", OF_TORCH], check=True)


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@each
def test_clipping_by_the_coefficient_equals_clip_grad_norm(kind: str) -> None:
    mine, theirs = parameters(), parameters()
    own, other = (make(p) for make, p in zip(MAKERS[kind], (mine, theirs), strict=True))
    for step in range(10):
        draw(mine, theirs, step)
        stats = grad_stats([[p.grad for p in mine]], max_norm=1.0)
        own.step(clip_coef=stats.clip_coef)
        nn.utils.clip_grad_norm_(theirs, 1.0)
        other.step()
    assert_same(mine, theirs)


@each
def test_one_call_for_all_has_the_bits_of_a_call_for_each(kind: str) -> None:
    make, _ = MAKERS[kind]
    together, alone = ([parameters(seed) for seed in range(3)] for _ in range(2))
    own, others = ([make(params) for params in each] for each in (together, alone))
    for step in range(4):
        for index in range(3):
            draw(together[index], alone[index], step + index)
        # A column of a larger block, as grad_stats gives it.
        dice = torch.Generator().manual_seed(step)
        coef = torch.rand(3, 13, dtype=torch.float64, generator=dice)[:, 4]
        step_all(own, coef)
        for index, optimizer in enumerate(others):
            optimizer.step(clip_coef=coef[index])
    for one, other in zip(together, alone, strict=True):
        assert equal(one, other)


@each
@pytest.mark.parametrize("coefficient", [0.0, math.nan, -1.0])
def test_an_optimizer_without_a_usable_coefficient_stays_as_it_is(
    coefficient: float, kind: str
) -> None:
    params = [parameters(1), parameters(2)]
    optimizers = [MAKERS[kind][0](p) for p in params]
    for p in params:
        set_gradients(p, 1)
    step_all(optimizers)
    state = values_of(optimizers[0])
    values, others = ([p.detach().clone() for p in each] for each in params)
    for parameter in params[0]:
        if parameter.grad is not None:
            parameter.grad.fill_(math.nan)
    step_all(optimizers, torch.tensor([coefficient, 1.0], dtype=torch.float64))
    assert equal(state, values_of(optimizers[0]))
    assert equal(values, params[0])
    assert not equal(others, params[1])


@each
def test_loss_scale_and_found_inf(kind: str) -> None:
    mine, theirs = parameters(), parameters()
    own, plain = (MAKERS[kind][0](p) for p in (mine, theirs))
    draw(theirs, mine, 1, factor=1024.0)
    own.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
    own.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    own.step()
    plain.step()
    assert equal(mine, theirs)  # by a power of two: no bit is lost
    before = values_of(own)
    own.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    own.step()
    assert equal(mine, theirs)
    assert equal(before, values_of(own))


@each
def test_a_gradient_scaler_leaves_its_scale_to_the_step(kind: str) -> None:
    mine, theirs = (nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    own, plain = (MAKERS[kind][0]([p]) for p in (mine, theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale((3 * mine).sum()).backward()
    scaler.step(own)
    (3 * theirs).sum().backward()
    plain.step()
    assert torch.equal(mine, theirs)
    assert own._step_supports_amp_scaling


@each
def test_zero_state_keeps_the_storage_and_parameters_without_a_gradient_stay(
    kind: str,
) -> None:
    mine = [nn.Parameter(torch.ones(shape)) for shape in ((4, 5), (5,), ())]
    optimizer = MAKERS[kind][0](mine)
    mine[1].grad = torch.ones(5)
    optimizer.step()
    assert [bool((p == 1).all()) for p in mine] == [True, False, True]
    optimizer.zero_state()
    values = [v for state in optimizer.state.values() for v in state.values()]
    optimizer.step()
    assert any(bool(v.any()) for v in values) or kind == "sgd without momentum"
    optimizer.zero_state()
    assert not any(bool(v.any()) for v in values)


@each
def test_closures_graphs_and_nothing_to_step(kind: str) -> None:
    p = nn.Parameter(torch.tensor([3.0]))
    optimizer = MAKERS[kind][0]([p])
    optimizer.step(clip_coef=torch.tensor(1.0))  # there is no gradient
    step_all([])

    def closure() -> float:
        optimizer.zero_grad()
        loss: Tensor = p.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 9
    assert p.item() < 3
    loss = p.square().sum()
    optimizer.step(closure)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # autograd sees that the parameter is another one now
