"""The CUDA kernels of `AdamW`: the steps of the CPU kernel, two launches. On a GPU or emulated."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from esper.ops.adamw import AdamW
from esper.ops.grad_stats import grad_stats
from esper.ops.optimizer import step_all
from tests.cuda.cases import with_sanitizer
from tests.cuda.test_sgd import CHUNK, on
from tests.emulation.device import KernelDevice
from tests.ops.test_sgd import assert_same, parameters, set_gradients

BETAS = ((0.9, 0.999), (0.0, 0.5))
BETAS_AND_DTYPES = product(BETAS, (torch.float32, torch.float64, torch.bfloat16))
SANITIZED = ((BETAS[0], torch.float64), (BETAS[0], torch.bfloat16))


def rate_on(device: KernelDevice, rate: float) -> Tensor:
    return torch.tensor(rate, device=device.torch)


def state_of(optimizer: AdamW, parameter: Tensor) -> tuple[Tensor, ...]:
    return optimizer.state_of(parameter, optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("betas", "dtype"), with_sanitizer(BETAS_AND_DTYPES, SANITIZED)
)
def test_many_steps_equal_the_cpu(
    device: KernelDevice, betas: tuple[float, float], dtype: torch.dtype
) -> None:
    cpu = parameters(dtype=dtype)
    mine = on(device, cpu)
    optimizers = (
        AdamW(cpu, torch.tensor(0.01), betas, weight_decay=0.1),
        AdamW(mine, rate_on(device, 0.01), betas, weight_decay=0.1),
    )
    for step in range(12):
        set_gradients(cpu, step)
        for own, theirs in zip(mine, cpu, strict=True):
            own.grad = None if theirs.grad is None else theirs.grad.to(device.torch)
        with device.cpu_kernels():
            optimizers[0].step()
        optimizers[1].step()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]
    for own, theirs in zip(mine, cpu, strict=True):
        expected = state_of(optimizers[0], theirs)
        found = state_of(optimizers[1], own)
        assert found[2].item() == expected[2].item()  # the count of steps
        pairs = zip((own, *found), (theirs, *expected), strict=True)
        values = [
            [nn.Parameter(value.detach().cpu()) for value in pair] for pair in pairs
        ]
        for a, b in values:
            assert_same([a], [b], tolerance)


# 40 and 352 tensors fill a table.
@pytest.mark.parametrize(
    "count", [1, 39, 40, pytest.param(41, marks=pytest.mark.sanitizer), 352, 353, 1000]
)
def test_more_tensors_than_one_table_holds(device: KernelDevice, count: int) -> None:
    """Moments of 0 move a parameter by its rate; each tensor has one of its own, and a coefficient."""
    params = [
        torch.full((1 + i % 50,), float(i), device=device.torch) for i in range(count)
    ]
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    steps = [torch.zeros((), device=device.torch) for _ in params]
    rates = [rate_on(device, 1.0 + i) for i in range(count)]
    coef = (torch.arange(count) % 3).double()  # every third one is not stepped
    torch.ops.esper.adamw_step_(
        *(
            params,
            [torch.ones_like(p) for p in params],
            *moments,
            steps,
            list(range(count)),
            rates,
        ),
        *([0.0] * count, coef.to(device.torch), None, None, 0.5, 0.75, 0.0),
    )
    for i, (p, step) in enumerate(zip(params, steps, strict=True)):
        stepped = i % 3 > 0
        torch.testing.assert_close(
            p.cpu(), torch.full((1 + i % 50,), float(i - (1.0 + i) * stepped))
        )
        assert step.item() == stepped


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
    """All blocks of a tensor take the same number of steps into account."""
    start = torch.randn(n, generator=torch.Generator().manual_seed(n))
    p = nn.Parameter(start.to(device.torch, copy=True))
    optimizer = AdamW([p], rate_on(device, 0.5), betas=(0.5, 0.75))
    for gradient in (1.0, 3.0):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
    # First m / c1 = √v / c2 = 1; then m = 0.25 + 1.5, c1 = 0.75, v = 0.75 · 0.25 + 2.25 and c2² = 7 / 16.
    moved = 0.5 + 0.5 * (1.75 / 0.75) / math.sqrt(2.4375 / 0.4375)
    torch.testing.assert_close(p.detach().cpu(), start - moved)
    assert optimizer.state[p]["step"].item() == 2


def test_empty_tensors_only_count(device: KernelDevice) -> None:
    empty = [
        nn.Parameter(torch.zeros(shape, device=device.torch))
        for shape in ((0,), (3, 0))
    ]
    optimizer = AdamW(empty, rate_on(device, 0.1))
    for p in empty:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in empty] == [1, 1]


def test_coefficients_come_from_grad_stats(device: KernelDevice) -> None:
    params = [on(device, parameters(seed)) for seed in range(3)]
    optimizers = [AdamW(p, rate_on(device, 0.1), eps=1.0) for p in params]
    for i, p in enumerate(params):
        for j, parameter in enumerate(p):
            parameter.grad = torch.full_like(parameter, 0.1 * (1 + i + j))
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
        assert set(changed) == {i != 1}
        assert {state_of(optimizers[i], parameter)[2].item() for parameter in p} == {
            float(i != 1)
        }
    norms = grad_stats(
        [[state_of(optimizers[2], parameter)[0] / 0.1 for parameter in params[2]]]
    ).norm
    assert norms.item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("count", [3, 300])
def test_a_kernel_counts_and_a_kernel_steps(device: KernelDevice, count: int) -> None:
    params = [nn.Parameter(torch.ones(48, device=device.torch)) for _ in range(count)]
    optimizer = AdamW(params, rate_on(device, 0.1))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()  # makes the moments
    launched = device.launched(optimizer.step)
    assert len(launched) == 2, launched
    assert "count_kernel" in launched[0]
    assert "adamw_kernel" in launched[1]


def test_a_captured_step_counts_and_reads_new_rates_and_coefficients(
    device: KernelDevice,
) -> None:
    p, gradient, mean, square = (
        torch.full((100,), value, device=device.torch) for value in (0.0, 1.0, 0.0, 0.0)
    )
    step, rate, coef = (
        torch.tensor(value, device=device.torch) for value in (0.0, 0.5, [1.0])
    )
    state = (
        [p],
        [gradient],
        [mean],
        [square],
        [step],
        [0],
        [rate],
        [0.0],
        coef,
        None,
        None,
    )

    def run() -> None:
        torch.ops.esper.adamw_step_(*state, 0.5, 0.5, 0.0)

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


def test_a_gradient_scaler(device: KernelDevice) -> None:
    p = nn.Parameter(torch.ones(8, device=device.torch))
    optimizer = AdamW([p], rate_on(device, 0.5))
    scaler = torch.amp.GradScaler(device.torch.type, init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    mean = optimizer.state[p]["exp_avg"].clone()
    assert mean.tolist() == pytest.approx([0.1] * 8)
    assert p.detach().tolist() == pytest.approx([0.5] * 8)
    p.grad = torch.full_like(p, math.inf)
    scaler.scale(torch.zeros(1, device=device.torch))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(optimizer.state[p]["exp_avg"], mean)
    assert optimizer.state[p]["step"].item() == 1
    assert p.detach().tolist() == pytest.approx([0.5] * 8)
