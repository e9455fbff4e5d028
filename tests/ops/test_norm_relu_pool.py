"""`norm_relu_pool`: equal to BatchNorm2d, ReLU and max-pool, and the same bits with the pool outside.

Tests that take ``device`` run on the CPU here; tests/cuda runs them with the CUDA kernels, too.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.ops.norm_relu_pool import norm_relu_pool
from tests.cuda.cases import with_sanitizer
from tests.emulation.device import KernelDevice
from tests.ops.norm_relu_pool_cases import (
    DTYPES,
    EPS,
    SHAPES,
    Case,
    Shape,
    assert_equals_twin,
    assert_same_bits,
    by_operator,
    by_twin,
    case,
    gradient_like,
)

forward = torch.ops.esper.norm_relu_pool.default
backward = torch.ops.esper.norm_relu_pool_backward.default


SANITIZED = (
    ((3, 8, 7, 6), torch.bfloat16, True, True),
    ((2, 1, 8, 9), torch.float32, True, True),
    ((2, 17, 6, 5), torch.float32, True, False),
    ((2, 71, 7, 2), torch.bfloat16, False, True),
    ((1, 40, 2, 3), torch.float32, False, False),
)


def pairwise() -> list[tuple[Shape, torch.dtype, bool, bool]]:
    """Each shape with both types; with and without the pool, and with statistics of the batch and given ones."""
    cases = list(SANITIZED)
    for place, shape in enumerate(SHAPES):
        for number, dtype in enumerate(DTYPES):
            pool = (place + number) % 2 == 0
            batch = (place // 2) % 2 == 0
            cases.append((shape, dtype, pool, batch))
    return list(dict.fromkeys(cases))


@pytest.mark.parametrize(
    ("shape", "dtype", "pool", "batch"), with_sanitizer(pairwise(), SANITIZED)
)
def test_values_and_gradients(
    device: KernelDevice, shape: Shape, dtype: torch.dtype, pool: bool, batch: bool
) -> None:
    assert_equals_twin(case(shape, dtype, batch, device=device.torch), pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (8, 72, 20, 20)])
def test_same_bits_with_the_pool_outside(
    device: KernelDevice, shape: Shape, dtype: torch.dtype
) -> None:
    c = case(shape, dtype, batch=shape[0] % 2 == 0, seed=3, device=device.torch)
    outside = by_operator(c, pool=False, pool_outside=True)
    assert_same_bits(by_operator(c, pool=True), outside)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(
        st.integers(1, 3), st.integers(1, 50), st.integers(2, 9), st.integers(2, 9)
    ),
    dtype=st.sampled_from(DTYPES),
    pool=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    shape: tuple[int, int, int, int], dtype: torch.dtype, pool: bool, seed: int
) -> None:
    c = case(shape, dtype, batch=False, seed=seed)
    assert_equals_twin(c, pool)
    assert_same_bits(
        by_operator(c, pool=True), by_operator(c, pool=False, pool_outside=True)
    )


def test_known_numbers() -> None:
    # One channel of 1, 2, 3, 6: mean 3, biased variance 3.5, unbiased 14 / 3. weight 2 and bias 1 with eps 0.5 give
    # x - 2 = -1, 0, 1, 4: the pool takes 4 from place 3.
    x = torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 1, 2, 2)
    weight, bias = torch.tensor([2.0]), torch.tensor([1.0])
    output, statistics, choice = norm_relu_pool(x, weight, bias, eps=0.5)
    assert output.item() == 4
    assert statistics.flatten().tolist() == pytest.approx([3.0, 0.5, 14 / 3])
    assert choice.item() == 3
    plain, _, none = norm_relu_pool(x, weight, bias, eps=0.5, pool=False)
    assert plain.flatten().tolist() == [0, 0, 1, 4]
    assert none.numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_are_broken_as_pytorch_breaks_them(dtype: torch.dtype) -> None:
    # Statistics 0 and 1, so that y = x exactly; five values make ties in nearly every window, and dead windows too.
    generator = torch.Generator().manual_seed(1)
    x = (
        torch.randint(-3, 2, (4, 16, 8, 8), generator=generator)
        .to(dtype)
        .to(memory_format=torch.channels_last)
    )
    c = Case(
        x,
        torch.ones(16),
        torch.zeros(16),
        (torch.zeros(16), torch.full((16,), 1 - 2.0**-20)),
    )
    actual, expected = by_operator(c, pool=True), by_twin(c, pool=True)
    assert torch.equal(actual.x != 0, expected.x != 0)
    torch.testing.assert_close(actual.x, expected.x)
    _, _, choice = norm_relu_pool(c.x, c.weight, c.bias, *c.running, EPS, True)  # type: ignore[misc]
    assert choice.unique().tolist() == [0, 1, 2, 3, 4]


def test_argmax_is_taken_after_rounding() -> None:
    # 256 and 256.9 are one bfloat16 value: the first wins, though the second is larger.
    x = torch.tensor([256.0, 257.0, 1.0, 2.0]).view(1, 1, 2, 2).bfloat16()
    weight, bias = torch.tensor([1.0]), torch.tensor([0.9])
    output, _, choice = norm_relu_pool(
        x, weight, bias, torch.zeros(1), torch.ones(1), 0.0
    )
    assert output.item() == 256
    assert choice.item() == 0


@pytest.mark.parametrize(
    ("dtype", "pool", "channels"),
    [
        (torch.float32, True, 8),
        (torch.bfloat16, False, 16),
        (torch.bfloat16, True, 5),
        (torch.float32, False, 16),
    ],
)
def test_nan_and_inf_propagate_as_in_pytorch(
    device: KernelDevice, dtype: torch.dtype, pool: bool, channels: int
) -> None:
    c = case((6, channels, 8, 8), dtype, batch=False, device=device.torch)
    flat = c.x.permute(0, 2, 3, 1).reshape(-1)
    chosen = torch.rand(flat.shape, generator=torch.Generator().manual_seed(2))
    flat[(chosen < 0.2).to(device.torch)] = math.nan
    flat[((chosen > 0.2) & (chosen < 0.25)).to(device.torch)] = math.inf
    flat[((chosen > 0.25) & (chosen < 0.3)).to(device.torch)] = -math.inf
    c = c._replace(x=flat.view(6, 8, 8, channels).permute(0, 3, 1, 2))
    actual, expected = by_operator(c, pool), by_twin(c, pool)
    assert torch.equal(actual.output.isnan(), expected.output.isnan())
    assert torch.equal(actual.output.isinf(), expected.output.isinf())
    # Of two NaN in a window, the last has the gradient.
    assert torch.equal(actual.x != 0, expected.x != 0)
    torch.testing.assert_close(actual.bias, expected.bias, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_makes_its_channel_nan(dtype: torch.dtype) -> None:
    c = case((2, 16, 8, 8), dtype)
    c.x[1, 3, 5, 2] = math.nan
    output, statistics, _ = norm_relu_pool(c.x, c.weight, c.bias)
    bad = torch.zeros(16, dtype=torch.bool)
    bad[3] = True
    assert torch.equal(statistics.isnan().all(dim=0), bad)
    assert torch.equal(output.isnan().all(dim=(2, 3))[1], bad)
    assert not output[:, ~bad].isnan().any()


@pytest.mark.parametrize("offset", [1e3, -1e4])
def test_a_mean_far_above_the_spread_loses_nothing(
    device: KernelDevice, offset: float
) -> None:
    c = case((16, 8, 32, 32), torch.float32, device=device.torch)
    x = c.x + offset
    _, statistics, _ = norm_relu_pool(x, c.weight, c.bias, eps=EPS)
    exact = x.double()
    for row, wanted, rtol in (
        (statistics[0], exact.mean(dim=(0, 2, 3)), 1e-7),
        (statistics[2], exact.var(dim=(0, 2, 3)), 2e-6),
    ):
        torch.testing.assert_close(row.double(), wanted, rtol=rtol, atol=0)


@pytest.mark.filterwarnings("ignore:.*not a double precision floating point")
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("batch", [True, False])
def test_gradcheck(pool: bool, batch: bool) -> None:
    # float32, so differences are wide; the values of a window and zero are further apart than they reach.
    generator = torch.Generator().manual_seed(0)
    values = (
        torch.randperm(2 * 4 * 4, generator=generator)
        .float()
        .view(2, 1, 4, 4)
        .expand(2, 3, 4, 4)
        / 4
        - 3.9
    )
    x = values.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.tensor([1.0, -0.7, 2.0], requires_grad=True)
    bias = torch.tensor([0.05, 0.1, 0.03], requires_grad=True)
    running = (None, None) if batch else (torch.zeros(3), torch.ones(3))
    assert torch.autograd.gradcheck(
        lambda x, w, b: norm_relu_pool(x, w, b, *running, EPS, pool)[0],
        (x, weight, bias),
        eps=4e-3,
        atol=2e-2,
        rtol=2e-2,
        fast_mode=False,
    )


def test_gradients_of_any_layout() -> None:
    c = case((2, 8, 8, 8), torch.float32)
    x = c.x.requires_grad_()
    output, _, _ = norm_relu_pool(x, c.weight, c.bias)
    gradient = gradient_like(output)
    (expected,) = torch.autograd.grad(output, x, gradient, retain_graph=True)
    (contiguous,) = torch.autograd.grad(
        output, x, gradient.contiguous(), retain_graph=True
    )
    assert torch.equal(expected, contiguous)
    (summed,) = torch.autograd.grad(output.sum(), x)  # an expanded gradient
    assert summed.isfinite().all()


def test_only_input_statistics_and_choice_are_saved() -> None:
    c = case((2, 8, 8, 8), torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t) or t, lambda t: t
    ):
        norm_relu_pool(c.x.requires_grad_(), c.weight.requires_grad_(), c.bias)
    sizes = sorted((tuple(t.shape), t.dtype) for t in saved)
    parameters = [((8,), torch.float32)] * 2
    assert sizes == sorted(
        [
            *parameters,
            ((2, 8, 8, 8), torch.bfloat16),
            ((3, 8), torch.float32),
            ((2, 8, 4, 4), torch.uint8),
        ]
    )


def test_differentiating_twice_is_refused() -> None:
    c = case((2, 8, 4, 4), torch.float32)
    x = c.x.requires_grad_()
    (gradient,) = torch.autograd.grad(
        norm_relu_pool(x, c.weight, c.bias)[0].sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        gradient.sum().backward()


def test_same_bits_from_many_threads() -> None:
    c = case((8, 16, 16, 16), torch.bfloat16)
    expected = by_operator(c, pool=True)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: by_operator(c, pool=True), range(16)):
            assert_same_bits(results, expected)


@pytest.mark.sanitizer
def test_an_empty_input(device: KernelDevice) -> None:
    x = torch.empty(0, 8, 4, 4, device=device.torch)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.ones(8, device=device.torch, requires_grad=True)
    output, statistics, choice = norm_relu_pool(x, weight, torch.zeros_like(weight))
    assert output.shape == choice.shape == (0, 8, 2, 2)
    assert not statistics.any()
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert weight.grad is not None
    assert weight.grad.tolist() == [0] * 8


X = torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last)
ROW = torch.zeros(2, 8, 1, 4).to(memory_format=torch.channels_last)
ONES = torch.ones(8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0], ONES, ONES), r"input must be \[N, C, H, W\], and has 3 dimensions"),
        ((X.double(), ONES, ONES), "input must be float32 or bfloat16"),
        ((X.contiguous(), ONES, ONES), "input must be contiguous in channels_last"),
        ((ROW, ONES, ONES), "a 2x2 pool needs an input of at least 2x2, got 1x4"),
        (
            (X, torch.ones(7), ONES),
            r"weight must be contiguous float32 \[8\] on the input's device",
        ),
        ((X, ONES, ONES, ONES), "give both running_mean and running_var, or neither"),
        ((X, ONES, ONES, None, None, -1.0), "eps must not be negative, got -1"),
        (
            (X[:1, :, :1, :1], ONES, ONES, None, None, EPS, False),
            "need more than one value per channel",
        ),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^norm_relu_pool: .*{message}"):
        norm_relu_pool(*arguments)  # type: ignore[arg-type]


def test_wrong_arguments_of_backward_and_update() -> None:
    output, statistics, choice = norm_relu_pool(X, ONES, ONES)
    with pytest.raises(
        RuntimeError,
        match=r"grad_output must be like the output: \[2, 8, 2, 2\] in channels_last",
    ):
        backward(X, X, ONES, ONES, statistics, choice, True, True)
    with pytest.raises(
        RuntimeError, match="choice must be uint8 as forward returned it"
    ):
        backward(output, X, ONES, ONES, statistics, choice[:1], True, True)
    with pytest.raises(
        RuntimeError, match=r"statistics must be contiguous float32 \[3, 8\]"
    ):
        backward(output, X, ONES, ONES, statistics[:2], choice, True, True)
    update = torch.ops.esper.norm_relu_pool_update_.default
    count = torch.zeros((), dtype=torch.int64)
    with pytest.raises(
        RuntimeError, match=r"momentum must be from 0 to 1, or None, got 1\.5"
    ):
        update(ONES.clone(), ONES.clone(), count, statistics, 1.5)
    with pytest.raises(RuntimeError, match="num_batches_tracked must be one int64"):
        update(ONES.clone(), ONES.clone(), count.float(), statistics, 0.1)
