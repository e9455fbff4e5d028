"""Inputs and comparisons that the CPU and the CUDA tests of `norm_relu_pool` share."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.ops.norm_relu_pool import norm_relu_pool
from tests.ops.twins import norm_relu_pool_twin

DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5
Shape = tuple[int, int, int, int]

# Every way to cut channels into groups, odd heights and widths, one pixel more or less than a group of windows.
SHAPES = (
    (4, 8, 32, 32),
    (3, 8, 6, 8),
    (3, 8, 5, 12),
    (3, 8, 7, 6),
    (2, 8, 9, 7),
    (2, 16, 16, 16),
    (5, 16, 3, 5),
    (3, 32, 8, 8),
    (2, 24, 4, 6),
    (2, 1, 8, 9),
    (2, 3, 5, 7),
    (3, 7, 4, 4),
    (2, 17, 6, 5),
    (1, 40, 2, 3),
    (2, 71, 7, 2),
    (300, 5, 2, 2),
)


class Case(NamedTuple):
    x: Tensor  # [N, C, H, W] channels_last
    weight: Tensor  # [C], some negative
    bias: Tensor  # [C]
    running: tuple[Tensor, Tensor] | None


def case(
    shape: Shape,
    dtype: torch.dtype,
    batch: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    channels = shape[1]
    spread = torch.rand(channels, generator=generator).view(1, -1, 1, 1) * 3 + 0.1
    x = torch.randn(shape, generator=generator) * spread + torch.randn(
        channels, generator=generator
    ).view(1, -1, 1, 1)
    weight = torch.randn(channels, generator=generator) + 0.5
    bias = torch.randn(channels, generator=generator)
    running = None
    if not batch:
        mean = torch.randn(channels, generator=generator)
        running = (
            mean.to(device),
            (torch.rand(channels, generator=generator) + 0.5).to(device),
        )
    return Case(
        x.to(device, dtype).to(memory_format=torch.channels_last),
        weight.to(device),
        bias.to(device),
        running,
    )


class Results(NamedTuple):
    output: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor


def gradient_like(output: Tensor, seed: int = 5) -> Tensor:
    values = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(output.device, output.dtype).to(memory_format=torch.channels_last)


def _leaves(c: Case, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [
        t.detach().to(dtype or t.dtype).requires_grad_()
        for t in (c.x, c.weight, c.bias)
    ]
    return leaves[0], leaves[1], leaves[2]


def by_twin(c: Case, pool: bool, dtype: torch.dtype | None = None) -> Results:
    """Output and gradients of the three functions; ``dtype`` computes all of it in another precision."""
    x, weight, bias = _leaves(c, dtype)
    running = (
        None
        if c.running is None
        else (c.running[0].to(weight.dtype), c.running[1].to(weight.dtype))
    )
    output = norm_relu_pool_twin(x, weight, bias, running, EPS, pool)
    output.backward(gradient_like(output))
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return Results(output.detach(), x.grad, weight.grad, bias.grad)


def by_operator(c: Case, pool: bool, pool_outside: bool = False) -> Results:
    x, weight, bias = _leaves(c, None)
    mean, variance = (None, None) if c.running is None else c.running
    output, _, _ = norm_relu_pool(x, weight, bias, mean, variance, EPS, pool)
    if pool_outside:
        output = torch.nn.functional.max_pool2d(output, 2)
    output.backward(gradient_like(output))
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return Results(output.detach(), x.grad, weight.grad, bias.grad)


def assert_close_but_for_ties(
    actual: Tensor, expected: Tensor, rtol: float, atol: float
) -> None:
    """Close, except where values within rounding of each other, or of 0, were ordered the other way: at most 0.4 %."""
    assert actual.shape == expected.shape
    wrong = ~torch.isclose(
        actual.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True
    )
    allowed = max(2, int(0.004 * actual.numel()))
    assert wrong.sum() <= allowed, f"{int(wrong.sum())} of {actual.numel()} differ"


def assert_equals_twin(c: Case, pool: bool) -> None:
    """float32 is compared with float64, because torch's own float32 statistics lose digits in large batches."""
    low = c.x.dtype == torch.bfloat16
    actual, expected = (
        by_operator(c, pool),
        by_twin(c, pool, None if low else torch.float64),
    )
    assert actual.output.dtype == c.x.dtype
    assert actual.output.is_contiguous(memory_format=torch.channels_last)
    assert actual.x.is_contiguous(memory_format=torch.channels_last)
    rtol, atol = (1.6e-2, 1e-2) if low else (1e-5, 1e-5)
    torch.testing.assert_close(
        actual.output, expected.output, rtol=rtol, atol=atol, check_dtype=False
    )
    assert_close_but_for_ties(actual.x, expected.x, rtol, atol)
    # The sums add what a place that was chosen otherwise weighs.
    for mine, theirs in (
        (actual.weight, expected.weight),
        (actual.bias, expected.bias),
    ):
        scale = float(theirs.abs().max()) + 1
        torch.testing.assert_close(
            mine,
            theirs,
            rtol=0,
            atol=(2e-2 if low else 1e-4) * scale,
            check_dtype=False,
        )


def assert_same_bits(a: Results, b: Results) -> None:
    for name, mine, other in zip(Results._fields, a, b, strict=True):
        assert torch.equal(mine, other), name
