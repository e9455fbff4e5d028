"""The CUDA kernel of `SGD`: the steps of the CPU kernel, one launch. On a GPU or emulated."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from esper.ops.grad_stats import grad_stats
from esper.ops.optimizer import step_all
from esper.ops.sgd import SGD
from tests.cuda.cases import with_sanitizer
from tests.emulation.device import KernelDevice
from tests.ops.test_sgd import OPTIONS, assert_same, parameters, set_gradients

CHUNK = 8192


def on(device: KernelDevice, params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(device.torch, copy=True)) for p in params]


OPTIONS_AND_DTYPES = product(OPTIONS, (torch.float32, torch.float64, torch.bfloat16))
SANITIZED = ((OPTIONS[4], torch.float64), (OPTIONS[4], torch.bfloat16))


@pytest.mark.parametrize(
    ("options", "dtype"), with_sanitizer(OPTIONS_AND_DTYPES, SANITIZED)
)
def test_many_steps_equal_the_cpu(
    device: KernelDevice, options: dict[str, Any], dtype: torch.dtype
) -> None:
    cpu = parameters(dtype=dtype)
    mine = on(device, cpu)
    optimizers = SGD(cpu, **options), SGD(mine, **options)
    for step in range(12):
        set_gradients(cpu, step)
        for own, theirs in zip(mine, cpu, strict=True):
            own.grad = None if theirs.grad is None else theirs.grad.to(device.torch)
        with device.cpu_kernels():
            optimizers[0].step()
        optimizers[1].step()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]
    assert_same([nn.Parameter(p.detach().cpu()) for p in mine], cpu, tolerance)


# 40 and 352 tensors fill a table.
@pytest.mark.parametrize(
    "count", [1, 39, 40, pytest.param(41, marks=pytest.mark.sanitizer), 352, 353, 1000]
)
def test_more_tensors_than_one_table_holds(device: KernelDevice, count: int) -> None:
    mine = [
        nn.Parameter(torch.full((1 + i % 50,), float(i), device=device.torch))
        for i in range(count)
    ]
    optimizer = SGD(
        [{"params": [p], "lr": 1.0 + i} for i, p in enumerate(mine)], momentum=0.9
    )
    for p in mine:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for i, p in enumerate(mine):
        assert torch.equal(p.detach(), torch.full_like(p, i - (1.0 + i)))


@pytest.mark.parametrize(
    "n",
    [
        1,
        CHUNK - 1,
        CHUNK,
        pytest.param(CHUNK + 1, marks=pytest.mark.sanitizer),
        5 * CHUNK + 3,
    ],
)
def test_sizes_around_chunks(device: KernelDevice, n: int) -> None:
    start = torch.randn(n, generator=torch.Generator().manual_seed(n))
    p = nn.Parameter(start.to(device.torch, copy=True))
    p.grad = torch.ones_like(p)
    SGD([p], lr=0.5).step()
    assert torch.equal(p.detach().cpu(), start - 0.5)


def test_coefficients_come_from_grad_stats(device: KernelDevice) -> None:
    params = [on(device, parameters(seed)) for seed in range(3)]
    optimizers = [SGD(p, lr=0.1, momentum=0.9) for p in params]
    for i, p in enumerate(params):
        for j, parameter in enumerate(p):
            parameter.grad = torch.full_like(parameter, 0.1 * (i + j))
    assert params[1][0].grad is not None
    params[1][0].grad.fill_(math.nan)
    before = [[parameter.detach().clone() for parameter in p] for p in params]
    stats = grad_stats(
        [[parameter.grad for parameter in p] for p in params], max_norm=1.0
    )
    step_all(optimizers, stats.clip_coef)
    for i, p in enumerate(params):
        changed = [
            not torch.equal(a.detach(), b)
            for a, b in zip(p, before[i], strict=True)
            if a.numel() > 0
        ]
        assert any(changed) is (i != 1)
    norms = grad_stats(
        [[(a.detach() - b) / 0.1 for a, b in zip(params[2], before[2], strict=True)]]
    ).norm
    assert norms.item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("count", [3, 300])
def test_one_kernel(device: KernelDevice, count: int) -> None:
    params = [nn.Parameter(torch.ones(48, device=device.torch)) for _ in range(count)]
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    for p in params:
        p.grad = torch.ones_like(p)
    coef = torch.ones(1, device=device.torch)
    optimizer.step(clip_coef=coef)  # makes the momentum buffers
    launched = device.launched(lambda: optimizer.step(clip_coef=coef))
    assert len(launched) == 1, launched


def test_a_captured_step_reads_new_rates_and_coefficients(device: KernelDevice) -> None:
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


def test_a_gradient_scaler(device: KernelDevice) -> None:
    p = nn.Parameter(torch.ones(8, device=device.torch))
    optimizer = SGD([p], lr=0.5)
    scaler = torch.amp.GradScaler(device.torch.type, init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert p.detach().tolist() == [0.5] * 8
    p.grad = torch.full_like(p, math.inf)
    scaler.scale(torch.zeros(1, device=device.torch))
    scaler.step(optimizer)
    scaler.update()
    assert p.detach().tolist() == [0.5] * 8
