"""The CUDA kernels of `SGD` and `AdamW`: the steps of the CPU kernels, one launch, or two. On a GPU or emulated."""

import math

import pytest
import torch
from torch import Tensor, nn

from esper.ops.grad_stats import grad_stats
from esper.ops.optimizer import SGD, step_all
from tests.cuda.cases import with_sanitizer
from tests.emulation.device import KernelDevice
from tests.ops.test_optimizer import (
    MAKERS,
    TOLERANCES,
    assert_same,
    make_adamw,
    parameters,
    set_gradients,
    values_of,
)

CHUNK = 8192
KINDS = pytest.mark.parametrize("kind", ["momentum", "adamw"])
STEPPED = [
    ("sgd", torch.float32),
    ("momentum", torch.bfloat16),
    *(("nesterov", dtype) for dtype in TOLERANCES),
    *(("adamw", dtype) for dtype in TOLERANCES),
    ("adamw of the last gradient", torch.float64),
]
SANITIZED = [
    ("nesterov", torch.float64),
    ("nesterov", torch.bfloat16),
    ("adamw", torch.float64),
    ("adamw", torch.bfloat16),
]
TABLES = [1, 39, 40, pytest.param(41, marks=pytest.mark.sanitizer), 352, 353, 1000]
"""Numbers of tensors; 40 and 352 fill a table."""
SIZES = [
    1,
    CHUNK - 1,
    CHUNK,
    pytest.param(CHUNK + 1, marks=pytest.mark.sanitizer),
    5 * CHUNK + 3,
]


def scalar(device: KernelDevice, value: float) -> Tensor:
    return torch.tensor(value, device=device.torch)


def on(device: KernelDevice, params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(device.torch, copy=True)) for p in params]


@pytest.mark.parametrize(("kind", "dtype"), with_sanitizer(STEPPED, SANITIZED))
def test_many_steps_equal_the_cpu(
    device: KernelDevice, kind: str, dtype: torch.dtype
) -> None:
    cpu = parameters(dtype=dtype)
    mine = on(device, cpu)
    theirs, own = MAKERS[kind][0](cpu), MAKERS[kind][0](mine)
    for step in range(12):
        set_gradients(cpu, step)
        set_gradients(mine, step)
        with device.cpu_kernels():
            theirs.step()
        own.step()
    for found, expected in (
        (mine, cpu),
        (values_of(own, mine), values_of(theirs, cpu)),
    ):
        found = [value.detach().cpu() for value in found]
        assert_same(found, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("count", TABLES)
def test_more_tensors_than_one_table_holds_for_sgd(
    device: KernelDevice, count: int
) -> None:
    groups = []
    for i in range(count):
        p = nn.Parameter(torch.full((1 + i % 50,), float(i), device=device.torch))
        p.grad = torch.ones_like(p)
        groups.append({"params": [p], "lr": 1.0 + i})
    SGD(groups, momentum=0.9).step()
    for i, group in enumerate(groups):
        (p,) = group["params"]  # type: ignore[misc]
        assert torch.equal(p.detach(), torch.full_like(p, i - (1.0 + i)))


@pytest.mark.parametrize("count", TABLES)
def test_more_tensors_than_one_table_holds_for_adamw(
    device: KernelDevice, count: int
) -> None:
    """Moments of 0 move a parameter by its rate; each tensor has one of its own, and a coefficient."""
    sizes = [1 + i % 50 for i in range(count)]
    params, grads, means, squares = (
        [torch.full((size,), value, device=device.torch) for size in sizes]
        for value in (0.0, 1.0, 0.0, 0.0)
    )
    steps = [scalar(device, 0.0) for _ in params]
    rates = [scalar(device, 1.0 + i) for i in range(count)]
    coef = (torch.arange(count) % 3).double()  # every third one is not stepped
    state = (params, grads, means, squares, steps, list(range(count)), rates)
    decays = [0.0] * count
    more = (decays, coef.to(device.torch), None, None, 0.5, 0.75, 0.0)
    torch.ops.esper.adamw_step_(*state, *more)
    for i, (p, step) in enumerate(zip(params, steps, strict=True)):
        stepped = i % 3 > 0
        torch.testing.assert_close(p, torch.full_like(p, -(1.0 + i) * stepped))
        assert step.item() == stepped


@pytest.mark.parametrize("n", SIZES)
def test_sizes_around_chunks_for_sgd(device: KernelDevice, n: int) -> None:
    start = torch.randn(n, generator=torch.Generator().manual_seed(n))
    p = nn.Parameter(start.to(device.torch, copy=True))
    p.grad = torch.ones_like(p)
    SGD([p], lr=0.5).step()
    assert torch.equal(p.detach().cpu(), start - 0.5)


@pytest.mark.parametrize("n", SIZES)
def test_sizes_around_chunks_for_adamw(device: KernelDevice, n: int) -> None:
    """All blocks of a tensor take the same number of steps into account."""
    start = torch.randn(n, generator=torch.Generator().manual_seed(n))
    p = nn.Parameter(start.to(device.torch, copy=True))
    optimizer = make_adamw([p], 0.5, betas=(0.5, 0.75))
    for gradient in (1.0, 3.0):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
    # First m / c1 = √v / c2 = 1; then m = 0.25 + 1.5, c1 = 0.75, v = 0.75 · 0.25 + 2.25 and c2² = 7 / 16.
    moved = 0.5 + 0.5 * (1.75 / 0.75) / math.sqrt(2.4375 / 0.4375)
    torch.testing.assert_close(p.detach().cpu(), start - moved)
    assert optimizer.state[p]["step"].item() == 2


def test_empty_tensors_only_count(device: KernelDevice) -> None:
    shapes = ((0,), (3, 0))
    empty = [nn.Parameter(torch.zeros(shape, device=device.torch)) for shape in shapes]
    optimizer = make_adamw(empty)
    for p in empty:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in empty] == [1, 1]


@KINDS
def test_coefficients_come_from_grad_stats(device: KernelDevice, kind: str) -> None:
    """One optimizer is clipped to a norm of 1, and one is skipped."""
    params = [on(device, parameters(seed)) for seed in range(3)]
    optimizers = [MAKERS[kind][0](p, weight_decay=0.0) for p in params]
    for p in params:
        for parameter in p:
            parameter.grad = torch.full_like(parameter, 0.1)
    assert params[1][0].grad is not None
    params[1][0].grad.fill_(math.nan)
    before = [[parameter.detach().clone() for parameter in p] for p in params]
    stats = grad_stats([[q.grad for q in p] for p in params], max_norm=1.0)
    step_all(optimizers, stats.clip_coef)
    for i, p in enumerate(params):
        changed = set()
        for old, parameter in zip(before[i], p, strict=True):
            if old.numel():
                changed.add(not torch.equal(parameter.detach(), old))
        assert changed == {i != 1}
    name, factor = {"momentum": ("momentum_buffer", 1.0), "adamw": ("exp_avg", 0.1)}[
        kind
    ]
    moved = [optimizers[2].state[p][name] / factor for p in params[2]]
    assert grad_stats([moved]).norm.item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("count", [3, 300])
@KINDS
def test_a_kernel_steps_and_a_kernel_counts_for_adamw(
    device: KernelDevice, kind: str, count: int
) -> None:
    params = [nn.Parameter(torch.ones(48, device=device.torch)) for _ in range(count)]
    optimizer = MAKERS[kind][0](params)
    for p in params:
        p.grad = torch.ones_like(p)
    coef = torch.ones(1, device=device.torch)
    optimizer.step(clip_coef=coef)  # makes the state
    launched = device.launched(lambda: optimizer.step(clip_coef=coef))
    kernels = {"momentum": ["sgd_kernel"], "adamw": ["count_kernel", "adamw_kernel"]}
    assert len(launched) == len(kernels[kind]), launched
    for name, kernel in zip(kernels[kind], launched, strict=True):
        assert name in kernel


def test_a_captured_step_of_sgd_reads_new_rates_and_coefficients(
    device: KernelDevice,
) -> None:
    p = nn.Parameter(torch.zeros(100, device=device.torch))
    p.grad = torch.ones_like(p)
    optimizer = SGD([p], lr=1.0)
    coef = torch.ones(1, device=device.torch)
    optimizer.step(clip_coef=coef)
    replay = device.captured(lambda: optimizer.step(clip_coef=coef))
    value = p[0].item()
    for rate, coefficient in ((0.5, 1.0), (0.25, 0.5), (0.25, 0.0)):
        optimizer.param_groups[0]["lr"].fill_(rate)
        coef.fill_(coefficient)
        replay()
        value -= rate * coefficient
        assert p.detach().tolist() == [value] * 100


def test_a_captured_step_of_adamw_counts_and_reads_new_rates_and_coefficients(
    device: KernelDevice,
) -> None:
    p, gradient, mean, square = (
        torch.full((100,), value, device=device.torch) for value in (0.0, 1.0, 0.0, 0.0)
    )
    step, rate = scalar(device, 0.0), scalar(device, 0.5)
    coef = torch.ones(1, device=device.torch)
    state = ([p], [gradient], [mean], [square], [step])

    def run() -> None:
        more = ([0], [rate], [0.0], coef, None, None, 0.5, 0.5, 0.0)
        torch.ops.esper.adamw_step_(*state, *more)

    run()
    replay = device.captured(run)
    value, count = p[0].item(), step.item()
    for new_rate, coefficient in ((0.5, 1.0), (0.25, 1.0), (0.25, 0.0), (1.0, 1.0)):
        rate.fill_(new_rate)
        coef.fill_(coefficient)
        replay()
        value -= new_rate * coefficient  # unbiased moments of equal gradients stay 1
        count += coefficient
        assert p.tolist() == pytest.approx([value] * 100)
        assert step.item() == count


@KINDS
def test_a_gradient_scaler(device: KernelDevice, kind: str) -> None:
    p = nn.Parameter(torch.ones(8, device=device.torch))
    optimizer = MAKERS[kind][0]([p], lr=0.5, weight_decay=0.0)
    scaler = torch.amp.GradScaler(device.torch.type, init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    state = values_of(optimizer, [p])
    assert p.detach().tolist() == pytest.approx([0.5] * 8)
    p.grad = torch.full_like(p, math.inf)
    scaler.scale(torch.zeros(1, device=device.torch))
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, values_of(optimizer, [p]), state))
    assert p.detach().tolist() == pytest.approx([0.5] * 8)
