"""The CUDA kernels of `norm_relu_pool`, on a GPU or emulated: the tests of the CPU kernels, grids and launches."""

import pytest
import torch

from esper.ops.norm_relu_pool import NormReluPool, norm_relu_pool
from tests.emulation.device import KernelDevice
from tests.ops.norm_relu_pool_cases import (
    DTYPES,
    Case,
    Shape,
    assert_close_but_for_ties,
    assert_equals_twin,
    assert_same_bits,
    by_operator,
    case,
    gradient_like,
)
from tests.ops.test_norm_relu_pool import (  # noqa: F401  the tests run with these kernels, too
    test_a_mean_far_above_the_spread_loses_nothing,
    test_an_empty_input,
    test_nan_and_inf_propagate_as_in_pytorch,
    test_same_bits_with_the_pool_outside,
    test_values_and_gradients,
)


def on(
    device: KernelDevice,
    shape: Shape,
    dtype: torch.dtype,
    batch: bool = True,
    seed: int = 0,
) -> Case:
    return case(shape, dtype, batch, seed, device=device.torch)


# Where a thread takes one channel at a time, the sums have at most 132 blocks of 128 pixels or windows for 3 channels;
# the last shape is several tiles of channels.
@pytest.mark.parametrize(
    ("shape", "dtype", "pool"),
    [
        pytest.param(
            (12_000, 3, 2, 3), torch.float32, True, marks=pytest.mark.sanitizer
        ),
        ((12_000, 3, 2, 3), torch.bfloat16, False),
        ((16, 128, 24, 24), torch.float32, True),
        ((2, 1000, 3, 4), torch.bfloat16, True),
    ],
)
def test_more_pixels_and_channels_than_the_sums_have_blocks(
    device: KernelDevice,
    shape: Shape,
    dtype: torch.dtype,
    pool: bool,
) -> None:
    assert_equals_twin(on(device, shape, dtype), pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("pool", [True, False])
def test_blocks_that_take_several_turns(
    device: KernelDevice, channels: int, pool: bool, dtype: torch.dtype
) -> None:
    """The second launches have at most 528 blocks; the full shapes exceed what these take at once."""
    full = (70_000, channels, 2, 3) if channels == 3 else (1_100, channels, 32, 32)
    shape = full if device.torch.type == "cuda" else (40, channels, 10, 14)
    with (
        device.few_blocks("normalise_kernel", 2),
        device.few_blocks("gradient_kernel", 2),
    ):
        assert_equals_twin(on(device, shape, dtype), pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_computes_the_same(device: KernelDevice, dtype: torch.dtype) -> None:
    shape = (16, 16, 16, 16)
    mine = by_operator(on(device, shape, dtype), True)
    with device.cpu_kernels():
        theirs = by_operator(case(shape, dtype), True)
    rtol, atol = (1.6e-2, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    for cuda, cpu in zip(mine, theirs, strict=True):
        assert_close_but_for_ties(
            cuda.cpu(), cpu, rtol, max(atol, 2e-5 * float(cpu.abs().max()))
        )


@pytest.mark.sanitizer
def test_a_view_that_is_not_aligned(device: KernelDevice) -> None:
    c = on(device, (4, 8, 6, 6), torch.bfloat16)
    storage = torch.empty(c.x.numel() + 1, dtype=torch.bfloat16, device=device.torch)[
        1:
    ]
    x = storage.view(4, 6, 6, 8).permute(0, 3, 1, 2).copy_(c.x)
    assert x.data_ptr() % 16 != 0
    assert_equals_twin(c._replace(x=x), pool=True)


def test_same_bits_every_time(device: KernelDevice) -> None:
    c = on(device, (16, 32, 16, 16), torch.bfloat16)
    first = by_operator(c, pool=True)
    for _ in range(10):
        assert_same_bits(by_operator(c, pool=True), first)


@pytest.mark.parametrize("pool", [True, False])
def test_two_launches_each_way(device: KernelDevice, pool: bool) -> None:
    c = on(device, (32, 8, 16, 16), torch.bfloat16)
    output, statistics, choice = norm_relu_pool(c.x, c.weight, c.bias, pool=pool)
    gradient = gradient_like(output)
    backward = torch.ops.esper.norm_relu_pool_backward.default
    forward = device.launched(lambda: norm_relu_pool(c.x, c.weight, c.bias, pool=pool))
    assert len(forward) == 2, forward
    back = device.launched(
        lambda: backward(
            gradient, c.x, c.weight, c.bias, statistics, choice, True, pool
        )
    )
    assert len(back) == 2, back
    variance = c.weight.abs()
    evaluated = device.launched(
        lambda: norm_relu_pool(c.x, c.weight, c.bias, c.bias, variance, pool=pool)
    )
    assert len(evaluated) == 1, evaluated


@pytest.mark.parametrize(
    "channels", [16, pytest.param(600, marks=pytest.mark.sanitizer)]
)
def test_the_module_follows_batch_norm(device: KernelDevice, channels: int) -> None:
    """The kernel that updates the running statistics has one block of 512 threads."""
    fused, average = (
        NormReluPool(channels, pool=True),
        NormReluPool(channels, momentum=None),
    )
    plain, plain_average = (
        torch.nn.BatchNorm2d(channels),
        torch.nn.BatchNorm2d(channels, momentum=None),
    )
    modules = [
        module.to(device.torch) for module in (fused, average, plain, plain_average)
    ]
    inputs = [
        on(device, (16, channels, 4, 4), torch.float32, seed=i).x for i in range(4)
    ]
    for x in inputs:
        for module in modules:
            module(x)
    for mine, theirs in ((fused, plain), (average, plain_average)):
        assert mine.num_batches_tracked.item() == 4
        torch.testing.assert_close(
            mine.running_mean, theirs.running_mean, rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            mine.running_var, theirs.running_var, rtol=1e-5, atol=1e-6
        )
