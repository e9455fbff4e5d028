"""`SGD` on CUDA: the steps of the CPU, one launch, no sync, safe in a replayed graph."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from esper.ops import SGD, grad_stats, sgd_step
from tests.ops.test_sgd import OPTIONS, assert_same, parameters, set_gradients

pytestmark = pytest.mark.cuda

CHUNK = 8192


def on_gpu(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().cuda()) for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_many_steps_equal_the_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    cpu = parameters(dtype=dtype)
    gpu = on_gpu(cpu)
    optimizers = [SGD(cpu, **options), SGD(gpu, **options)]
    for step in range(30):
        set_gradients(cpu, step)
        for mine, theirs in zip(gpu, cpu, strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]
    assert_same([nn.Parameter(p.detach().cpu()) for p in gpu], cpu, tolerance)


@pytest.mark.parametrize("count", [1, 39, 40, 41, 352, 353, 1000])
def test_more_tensors_than_one_table_holds(count: int) -> None:
    gpu = [nn.Parameter(torch.full((1 + i % 50,), float(i), device="cuda")) for i in range(count)]
    optimizer = SGD([{"params": [p], "lr": 1.0 + i} for i, p in enumerate(gpu)], momentum=0.9)
    for p in gpu:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for i, p in enumerate(gpu):
        assert torch.equal(p.detach(), torch.full_like(p, i - (1.0 + i)))


@pytest.mark.parametrize("n", [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
def test_sizes_around_chunks(n: int) -> None:
    start = torch.randn(n, generator=torch.Generator().manual_seed(n))
    p = nn.Parameter(start.cuda())
    p.grad = torch.ones_like(p)
    SGD([p], lr=0.5).step()
    assert torch.equal(p.detach().cpu(), start - 0.5)


def test_coefficients_come_from_grad_stats_without_a_sync() -> None:
    params = [on_gpu(parameters(seed)) for seed in range(3)]
    optimizers = [SGD(p, lr=0.1, momentum=0.9) for p in params]
    for i, p in enumerate(params):
        for j, parameter in enumerate(p):
            parameter.grad = torch.full_like(parameter, 0.1 * (i + j))
    assert params[1][0].grad is not None
    params[1][0].grad.fill_(math.nan)
    before = [[parameter.detach().clone() for parameter in p] for p in params]
    sgd_step(optimizers, torch.ones(3, device="cuda") * 0)  # makes the momentum buffers
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = grad_stats([[parameter.grad for parameter in p] for p in params], max_norm=1.0)
        sgd_step(optimizers, stats.clip_coef)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for i, p in enumerate(params):
        changed = [not torch.equal(a.detach(), b) for a, b in zip(p, before[i], strict=True) if a.numel() > 0]
        assert any(changed) is (i != 1)
    norms = grad_stats([[(a.detach() - b) / 0.1 for a, b in zip(params[2], before[2], strict=True)]]).norm
    assert norms.item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("count", [3, 300])
def test_one_kernel(count: int) -> None:
    params = [nn.Parameter(torch.ones(48, device="cuda")) for _ in range(count)]
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    for p in params:
        p.grad = torch.ones_like(p)
    coef = torch.ones(1, device="cuda")
    optimizer.step(clip_coef=coef)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step(clip_coef=coef)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


def test_a_captured_step_reads_new_rates_and_coefficients() -> None:
    p = nn.Parameter(torch.zeros(100, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = SGD([p], lr=1.0)
    coef = torch.ones(1, device="cuda")
    optimizer.step(clip_coef=coef)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(clip_coef=coef)
    value = p[0].item()
    for rate, coefficient in ((0.5, 1.0), (0.25, 0.5), (0.25, 0.0)):
        optimizer.param_groups[0]["lr"].fill_(rate)
        coef.fill_(coefficient)
        graph.replay()
        value -= rate * coefficient
        assert p.detach().tolist() == [value] * 100


def test_a_gradient_scaler() -> None:
    p = nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = SGD([p], lr=0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert p.detach().tolist() == [0.5] * 8
    p.grad = torch.full_like(p, math.inf)
    scaler.scale(torch.zeros(1, device="cuda"))
    scaler.step(optimizer)
    scaler.update()
    assert p.detach().tolist() == [0.5] * 8


def test_parameters_on_two_devices_are_refused() -> None:
    params = [nn.Parameter(torch.ones(2, device="cuda")), nn.Parameter(torch.ones(2))]
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="parameter 1 is on another device"):
        SGD(params, lr=0.1).step()
