"""`norm_relu_pool` on CUDA: equal to the three PyTorch functions and to the CPU, two launches each way."""

import math
from collections.abc import Callable

import pytest
import torch

from esper.ops import NormReluPool, norm_relu_pool
from tests.ops.norm_relu_pool_cases import (
    DTYPES,
    EPS,
    SHAPES,
    Case,
    assert_close_but_for_ties,
    assert_equals_twin,
    assert_same_bits,
    by_operator,
    by_twin,
    case,
    gradient_like,
)

pytestmark = pytest.mark.cuda

# More pixels, windows and channels than one block, one row of partial sums and one tile hold.
LARGE = ((64, 8, 32, 32), (3, 256, 33, 31), (2, 1000, 3, 4), (70000, 3, 2, 3), (8, 72, 20, 20))


def on_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype, batch: bool = True, seed: int = 0) -> Case:
    return case(shape, dtype, batch, seed, device="cuda")


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE])
def test_values_and_gradients(shape: tuple[int, int, int, int], dtype: torch.dtype, pool: bool, batch: bool) -> None:
    assert_equals_twin(on_gpu(shape, dtype, batch), pool)


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE])
def test_same_bits_with_the_pool_outside(shape: tuple[int, int, int, int], dtype: torch.dtype, batch: bool) -> None:
    c = on_gpu(shape, dtype, batch, seed=3)
    assert_same_bits(by_operator(c, pool=True), by_operator(c, pool=False, pool_outside=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_computes_the_same(dtype: torch.dtype) -> None:
    gpu, cpu = on_gpu((16, 16, 16, 16), dtype), case((16, 16, 16, 16), dtype)
    rtol, atol = (1.6e-2, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    for theirs, mine in zip(by_operator(gpu, True), by_operator(cpu, True), strict=True):
        assert_close_but_for_ties(theirs.cpu(), mine, rtol, max(atol, 2e-5 * float(mine.abs().max())))


def test_a_view_that_is_not_aligned() -> None:
    c = on_gpu((4, 8, 6, 6), torch.bfloat16)
    storage = torch.empty(c.x.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:]
    x = storage.view(4, 6, 6, 8).permute(0, 3, 1, 2).copy_(c.x)
    assert x.data_ptr() % 16 != 0
    assert_equals_twin(c._replace(x=x), pool=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool", [True, False])
def test_nan_and_inf_go_where_pytorch_sends_them(dtype: torch.dtype, pool: bool) -> None:
    c = on_gpu((6, 16, 8, 8), dtype, batch=False)
    flat = c.x.permute(0, 2, 3, 1).reshape(-1)
    chosen = torch.rand(flat.shape, generator=torch.Generator().manual_seed(2)).cuda()
    flat[chosen < 0.2] = math.nan
    flat[(chosen > 0.2) & (chosen < 0.25)] = math.inf
    flat[(chosen > 0.25) & (chosen < 0.3)] = -math.inf
    c = c._replace(x=flat.view(6, 8, 8, 16).permute(0, 3, 1, 2))
    actual, expected = by_operator(c, pool), by_twin(c, pool)
    assert torch.equal(actual.output.isnan(), expected.output.isnan())
    assert torch.equal(actual.x != 0, expected.x != 0)


@pytest.mark.parametrize("offset", [1e3, -1e4])
def test_a_mean_far_above_the_spread_loses_nothing(offset: float) -> None:
    c = on_gpu((64, 8, 32, 32), torch.float32)
    x = c.x + offset
    x[0, :, 0, 0] = 2 * offset
    _, statistics, _ = norm_relu_pool(x, c.weight, c.bias, eps=EPS)
    exact = x.double()
    torch.testing.assert_close(statistics[0].double(), exact.mean(dim=(0, 2, 3)), rtol=1e-7, atol=0)
    torch.testing.assert_close(statistics[2].double(), exact.var(dim=(0, 2, 3)), rtol=2e-5, atol=0)


def test_same_bits_every_time() -> None:
    c = on_gpu((128, 32, 16, 16), torch.bfloat16)
    first = by_operator(c, pool=True)
    for _ in range(10):
        assert_same_bits(by_operator(c, pool=True), first)


def kernels(run: Callable[[], object]) -> list[str]:
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("pool", [True, False])
def test_two_launches_each_way(pool: bool) -> None:
    c = on_gpu((128, 8, 32, 32), torch.bfloat16)
    output, statistics, choice = norm_relu_pool(c.x, c.weight, c.bias, pool=pool)
    gradient = gradient_like(output)
    backward = torch.ops.esper.norm_relu_pool_backward.default
    assert len(kernels(lambda: norm_relu_pool(c.x, c.weight, c.bias, pool=pool))) == 2
    assert len(kernels(lambda: backward(gradient, c.x, c.weight, c.bias, statistics, choice, True, pool))) == 2
    evaluated = kernels(lambda: norm_relu_pool(c.x, c.weight, c.bias, c.bias, c.weight.abs(), pool=pool))
    assert len(evaluated) == 1


def test_the_module_follows_batch_norm_without_a_sync() -> None:
    fused, plain = NormReluPool(16, pool=True).cuda(), torch.nn.BatchNorm2d(16).cuda()
    average, plain_average = NormReluPool(16, momentum=None).cuda(), torch.nn.BatchNorm2d(16, momentum=None).cuda()
    inputs = [on_gpu((16, 16, 8, 8), torch.float32, seed=i).x for i in range(4)]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in inputs:
            fused(x)
            average(x)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for x in inputs:
        plain(x)
        plain_average(x)
    for mine, theirs in ((fused, plain), (average, plain_average)):
        assert mine.num_batches_tracked.item() == 4
        torch.testing.assert_close(mine.running_mean, theirs.running_mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.running_var, theirs.running_var, rtol=1e-5, atol=1e-6)


def test_a_captured_graph_can_be_replayed_on_new_values() -> None:
    module = NormReluPool(8, pool=True).cuda()
    x = on_gpu((32, 8, 16, 16), torch.bfloat16).x.requires_grad_()
    gradient = torch.ones(32, 8, 8, 8, dtype=torch.bfloat16, device="cuda").to(memory_format=torch.channels_last)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        output = module(x)
        (gradient_x,) = torch.autograd.grad(output, x, gradient)
        return output, gradient_x

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, gradient_x = step()
    for seed in range(3):
        with torch.no_grad():
            x.copy_(on_gpu((32, 8, 16, 16), torch.bfloat16, seed=seed).x)
        before = module.num_batches_tracked.item()
        graph.replay()
        assert module.num_batches_tracked.item() == before + 1
        expected, expected_x = step()
        assert torch.equal(output, expected)
        assert torch.equal(gradient_x, expected_x)


def test_runs_on_the_current_stream() -> None:
    x = torch.zeros(64, 8, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    ones = torch.ones(8, device="cuda")
    norm_relu_pool(x, ones, ones)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on another stream the kernel would not wait for this and see zeros
        x.fill_(3.0)
        _, statistics, _ = norm_relu_pool(x, ones, ones)
    stream.synchronize()
    assert statistics[0].tolist() == [3.0] * 8


def test_an_empty_input() -> None:
    x = torch.empty(0, 8, 4, 4, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.ones(8, device="cuda", requires_grad=True)
    output, statistics, _ = norm_relu_pool(x, weight, torch.zeros(8, device="cuda"))
    assert output.shape == (0, 8, 2, 2)
    assert not statistics.any()
    output.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0] * 8


def test_parameters_on_the_cpu_are_refused() -> None:
    x = on_gpu((2, 8, 4, 4), torch.float32).x
    with pytest.raises(RuntimeError, match="weight must be contiguous float32"):
        norm_relu_pool(x, torch.ones(8), torch.ones(8, device="cuda"))


@pytest.mark.parametrize("pool", [True, False])
def test_opcheck(pool: bool) -> None:
    c = on_gpu((2, 8, 6, 5), torch.float32)
    x, weight, bias = c.x.requires_grad_(), c.weight.requires_grad_(), c.bias.requires_grad_()
    torch.library.opcheck(torch.ops.esper.norm_relu_pool.default, (x, weight, bias, None, None, EPS, pool))
