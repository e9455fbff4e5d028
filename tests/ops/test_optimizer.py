"""Esper's optimizers on the CPU: the steps of those of torch, with clipping and skipping read from memory."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from esper.ops.grad_stats import grad_stats
from esper.ops.optimizer import SGD, Adam, AdamW, FusedOptimizer, step_all

SHAPES = ((1,), (7,), (16, 3, 3, 3), (33, 65), (), (0, 4), (1000,))
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}


def parameters(
    seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[nn.Parameter]:
    """One is channels_last, and one is empty."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in SHAPES:
        value = torch.randn(shape, generator=generator).to(device, dtype)
        if len(shape) == 4:
            value = value.to(memory_format=torch.channels_last)
        made.append(nn.Parameter(value))
    return made


def set_gradients(params: list[nn.Parameter], seed: int, factor: float = 1.0) -> None:
    """The same gradients for the same seed; one is None now and then."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for place, parameter in enumerate(params):
        gradient = factor * torch.randn(parameter.shape, generator=generator)
        parameter.grad = None
        if (seed + place) % 5:
            parameter.grad = gradient.to(parameter)


def like_parameters(params: list[nn.Parameter]) -> None:
    """Lays out gradients as their parameters, which the fused steps of torch need."""
    for parameter in params:
        if parameter.grad is not None:
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)


def assert_same(a: list[Any], b: list[Any], tolerance: float = 1e-6) -> None:
    """Relative to the size of each tensor: single elements near zero have lost more, in both."""
    for mine, theirs in zip(a, b, strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(map(torch.equal, one, other))


def make_adamw(params: list[nn.Parameter], lr: float = 0.01, **options: Any) -> AdamW:
    rate = torch.tensor(lr, dtype=torch.float64, device=params[0].device)
    return AdamW(params, rate, **{"weight_decay": 0.1, **options})


def torch_adamw(
    params: list[nn.Parameter], lr: float = 0.01, **options: Any
) -> torch.optim.AdamW:
    """Vectors do not decay."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    options = {"fused": True, "weight_decay": 0.1, **options}
    return torch.optim.AdamW(groups, lr=lr, **options)


MOMENTUM = {"momentum": 0.9, "weight_decay": 5e-4}
MAKERS: dict[
    str,
    tuple[Callable[..., FusedOptimizer], Callable[..., torch.optim.Optimizer]],
] = {
    "sgd": (partial(SGD, lr=0.1), partial(torch.optim.SGD, lr=0.1)),
    "momentum": (
        partial(SGD, lr=0.03, **MOMENTUM),
        partial(torch.optim.SGD, lr=0.03, **MOMENTUM),
    ),
    "nesterov": (
        partial(SGD, lr=0.03, nesterov=True, **MOMENTUM),
        partial(torch.optim.SGD, lr=0.03, nesterov=True, **MOMENTUM),
    ),
    "adamw": (make_adamw, torch_adamw),
    "adamw of the last gradient": (
        partial(make_adamw, betas=(0.0, 0.5)),
        partial(torch_adamw, betas=(0.0, 0.5)),
    ),
}
"""By name: Esper's optimizer and that of torch."""
each = pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])


def values_of(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter]
) -> list[Tensor]:
    """Copies of the state, in the order of the parameters."""
    values = []
    for parameter in params:
        state = sorted(optimizer.state.get(parameter, {}).items())
        values += [value for _, value in state if value is not None]
    return [torch.as_tensor(value).clone() for value in values]


SCRIPT = """
import sys

import torch

from esper.ops.optimizer import SGD, Adam, AdamW

for make in (Adam, SGD, AdamW):
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = make([weight], torch.tensor(0.1))
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
torch.optim.SGD([torch.nn.Parameter(torch.ones(3, 3))])
assert "torch._dynamo" in sys.modules, "torch does not import it either: LightOptimizer can go"
"""


@pytest.mark.slow
def test_making_stepping_and_saving_them_imports_no_compiler() -> None:
    """It takes a second and 70 MB."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def test_adam_steps_as_that_of_torch() -> None:
    weights = [nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2)]
    for make, weight in zip((Adam, torch.optim.Adam), weights, strict=True):
        optimizer = make([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (weight**2).sum().backward()
            optimizer.step()
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.linspace(-1, 1, 12))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in MAKERS),
        ("nesterov", torch.float64),
        ("nesterov", torch.bfloat16),
        ("adamw", torch.float64),
        ("adamw of the last gradient", torch.bfloat16),
    ],
)
def test_many_steps_equal_torch(kind: str, dtype: torch.dtype) -> None:
    mine, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    own, other = (make(p) for make, p in zip(MAKERS[kind], (mine, theirs), strict=True))
    for step in range(30):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        like_parameters(theirs)
        for group in (*own.param_groups, *other.param_groups):
            rate = 0.01 / (1 + step % 4)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        own.step()
        other.step()
    assert_same(mine, theirs, TOLERANCES[dtype])
    assert_same(values_of(own, mine), values_of(other, theirs), TOLERANCES[dtype])


def test_known_numbers_of_sgd() -> None:
    # g = 2 * 0.5 + 0.1 * 10 = 2; momentum 0 -> 2 -> 0.5 * 2 + 2 = 3 (the second g: 2 * 0.5 + 0.1 * 10 with p held).
    p = nn.Parameter(torch.tensor([10.0]))
    optimizer = SGD([p], lr=1.0, momentum=0.5, weight_decay=0.1)
    p.grad = torch.tensor([2.0])
    optimizer.step(clip_coef=torch.tensor([0.5]))
    assert p.item() == 8
    assert optimizer.state[p]["momentum_buffer"].item() == 2
    optimizer.step(clip_coef=torch.tensor([0.5]))  # g = 1 + 0.8 = 1.8, momentum 1 + 1.8
    assert p.item() == pytest.approx(8 - 2.8)


def test_known_numbers_of_adamw() -> None:
    # m = 0.5 · 0 + 0.5 · 2 = 1 and v = 0.75 · 0 + 0.25 · 4 = 1, which divided by 1 − 0.5 and 1 − 0.75 are 2 and 4.
    # The matrix decays to 10 · (1 − 0.1 · 2) = 8, and moves by 0.1 · 2 / (√4 + 2) = 0.05.
    params = []
    for shape in ((1, 1), (1,)):
        params.append(nn.Parameter(torch.full(shape, 10.0, dtype=torch.float64)))
        params[-1].grad = torch.full_like(params[-1], 8.0)
    optimizer = make_adamw(params, 0.1, betas=(0.5, 0.75), eps=2.0, weight_decay=2.0)
    optimizer.step(clip_coef=torch.tensor(0.25))
    assert [p.item() for p in params] == pytest.approx([7.95, 9.95], rel=1e-15)
    assert values_of(optimizer, params) == [1, 1, 1] * 2
    assert params[0].grad == 8, "gradients are not overwritten"


def test_a_gradient_far_below_the_mean_keeps_its_digits() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], torch.tensor(0.1), betas=(0.0, 0.9))
    for gradient in (1.0, 1e-9):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
        assert torch.equal(optimizer.state[p]["exp_avg"], p.grad)


def test_a_group_has_its_rate_decay_and_coefficient() -> None:
    params = [nn.Parameter(torch.tensor([8.0])) for _ in range(2)]
    for p in params:
        p.grad = torch.tensor([2.0])
    groups = [
        {"params": params[:1], "lr": 0.5, "weight_decay": 0.0},
        {"params": params[1:], "lr": 0.25, "weight_decay": 0.5},
    ]
    SGD(groups).step(clip_coef=torch.tensor([0.5, 2.0], dtype=torch.float64))
    assert [p.item() for p in params] == [7.5, 8 - 0.25 * (4 + 4)]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=12),
    ],
)
def test_schedulers_fill_the_rate(schedule: Callable[..., Any]) -> None:
    mine, theirs = parameters(), parameters()
    own, other = (
        make(p) for make, p in zip(MAKERS["momentum"], (mine, theirs), strict=True)
    )
    rate = own.param_groups[0]["lr"]
    schedules = schedule(own), schedule(other)
    for step in range(10):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        own.step()
        other.step()
        for scheduler in schedules:
            scheduler.step()
        assert own.param_groups[0]["lr"] is rate
        expected = other.param_groups[0]["lr"]
        assert rate.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert_same(mine, theirs)


@each
def test_clipping_by_the_coefficient_equals_clip_grad_norm(kind: str) -> None:
    mine, theirs = parameters(), parameters()
    own, other = (make(p) for make, p in zip(MAKERS[kind], (mine, theirs), strict=True))
    for step in range(10):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        like_parameters(theirs)
        stats = grad_stats([[p.grad for p in mine]], max_norm=1.0)
        own.step(clip_coef=stats.clip_coef)
        nn.utils.clip_grad_norm_(theirs, 1.0)
        other.step()
    assert_same(mine, theirs)


@each
def test_one_call_for_all_has_the_bits_of_a_call_for_each(kind: str) -> None:
    together, alone = ([parameters(seed) for seed in range(3)] for _ in range(2))
    own, others = [], []
    for index in range(3):
        options = {"lr": 0.01 * (1 + index), "weight_decay": 0.1 * index}
        own.append(MAKERS[kind][0](together[index], **options))
        others.append(MAKERS[kind][0](alone[index], **options))
    for step in range(4):
        for index in range(3):
            set_gradients(together[index], step + index)
            set_gradients(alone[index], step + index)
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
    state = values_of(optimizers[0], params[0])
    values, others = ([p.detach().clone() for p in each] for each in params)
    set_gradients(params[0], 1, math.nan)
    step_all(optimizers, torch.tensor([coefficient, 1.0], dtype=torch.float64))
    assert equal(state, values_of(optimizers[0], params[0]))
    assert equal(values, params[0])
    assert not equal(others, params[1])


@each
def test_loss_scale_and_found_inf(kind: str) -> None:
    mine, theirs = parameters(), parameters()
    own, plain = (MAKERS[kind][0](p) for p in (mine, theirs))
    set_gradients(mine, 1, 1024.0)
    set_gradients(theirs, 1)
    own.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
    own.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    own.step()
    plain.step()
    assert equal(mine, theirs)  # by a power of two: no bit is lost
    before = values_of(own, mine)
    own.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    own.step()
    assert equal(mine, theirs)
    assert equal(before, values_of(own, mine))


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
    assert any(bool(v.any()) for v in values) or kind == "sgd"
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


@pytest.mark.parametrize(
    ("kind", "options"),
    [("momentum", {}), ("adamw", {"fused": True}), ("adamw", {"fused": False})],
)
def test_state_goes_to_and_from_torch(kind: str, options: dict[str, Any]) -> None:
    mine, theirs = parameters(), parameters()
    make, make_other = MAKERS[kind][0], partial(MAKERS[kind][1], **options)
    own, other = make(mine), make_other(theirs)
    swapped = make(mine, lr=5.0), make_other(theirs, lr=5.0)
    for step in range(6):
        if step == 3:
            rate = swapped[0].param_groups[0]["lr"]
            swapped[0].load_state_dict(other.state_dict())
            swapped[1].load_state_dict(own.state_dict())
            assert swapped[0].param_groups[0]["lr"] is rate
            assert rate == own.param_groups[0]["lr"]
            own, other = swapped
        set_gradients(mine, step)
        set_gradients(theirs, step)
        like_parameters(theirs)
        own.step()
        other.step()
    # Many steps add to the differences of rounding; those of a single number, too.
    assert_same(mine, theirs, tolerance=1e-5)
    assert_same(values_of(own, mine), values_of(other, theirs), tolerance=1e-5)


def test_a_loaded_state_takes_the_layout_and_the_count_that_the_operator_needs() -> (
    None
):
    p = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = make_adamw([p])
    moment = torch.rand(4, 3, 2, 2)
    count = torch.tensor(7.0, dtype=torch.float64)
    saved = {"step": count, "exp_avg": moment, "exp_avg_sq": moment + 1}
    groups = torch_adamw([p]).state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: saved}, "param_groups": groups})
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[p][name], saved[name])
        assert optimizer.state[p][name].stride() == p.stride()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 8


def test_state_of_another_kind_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    saved = torch_adamw([weight], amsgrad=True).state_dict()
    with pytest.raises(ValueError, match=r"amsgrad=True, and Esper's AdamW only does"):
        make_adamw([weight]).load_state_dict(saved)
    saved = torch.optim.SGD([weight], momentum=0.9, dampening=0.5).state_dict()
    with pytest.raises(ValueError, match=r"dampening=0.5, and Esper's SGD only does 0"):
        SGD([weight]).load_state_dict(saved)
    groups: list[dict[str, Any]] = [{"params": [weight], "lr": 0.5}, {"params": []}]
    saved = torch.optim.AdamW(groups, lr=0.25).state_dict()
    optimizer = make_adamw([weight], 0.125)
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    optimizer = make_adamw([weight], 0.125)
    for group in optimizer.param_groups:
        group["lr"] = optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=r"share a learning rate .* \[0.5, 0.25\]"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_wrong_options_and_optimizers_that_cannot_be_stepped_together() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for p in params:
        p.grad = torch.ones(2)
    for options, message in (
        ({"lr": -1.0}, "lr must not be negative, got -1"),
        ({"momentum": -0.1}, "momentum must not be negative"),
        ({"weight_decay": math.nan}, "weight_decay must not be negative, got nan"),
        ({"nesterov": True}, "nesterov needs momentum"),
    ):
        with pytest.raises(ValueError, match=message):
            SGD(params, **options)  # type: ignore[arg-type]
    first = make_adamw(params[:1])
    more = make_adamw(params[1:2])
    more.add_param_group({"params": params[2:]})
    step_all([first, more])
    assert all(bool((p < 1).all()) for p in params)
    with pytest.raises(ValueError, match=r"have equally many groups, not \[2, 3\]"):
        step_all([first, more], torch.ones(2))
