"""The CUDA kernel of `grad_stats`: equal to the twin, deterministic, one launch. On a GPU or emulated."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from esper.ops.grad_stats import grad_stats
from tests.cuda.cases import with_sanitizer
from tests.emulation.device import KernelDevice
from tests.ops.twins import grad_stats_twin

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RTOL = 2e-6
CHUNK = 8192


def gradient(
    device: KernelDevice, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        device.torch, dtype
    )


def assert_equals_twin(groups: list[list[Tensor | None]]) -> None:
    stats = grad_stats(groups)
    fields, norms = grad_stats_twin(
        [[g if g is None else g.cpu() for g in group] for group in groups]
    )
    torch.testing.assert_close(
        stats.fields.cpu(), fields, rtol=RTOL, atol=0, equal_nan=True
    )
    torch.testing.assert_close(
        stats.norms.cpu(), norms, rtol=RTOL, atol=0, equal_nan=True
    )


SIZES = product(
    DTYPES, [1, 3, 4, 5, 8, 9, 1023, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 40 * CHUNK + 5]
)
SANITIZED_SIZES = (
    (torch.float32, 1),
    (torch.bfloat16, 9),
    (torch.float64, CHUNK - 1),
    (torch.float16, CHUNK + 1),
    (torch.float32, 40 * CHUNK + 5),
)


@pytest.mark.parametrize(("dtype", "n"), with_sanitizer(SIZES, SANITIZED_SIZES))
def test_sizes_around_vectors_and_chunks(
    device: KernelDevice, dtype: torch.dtype, n: int
) -> None:
    g = gradient(device, n, seed=n, dtype=dtype)
    g[::3] = 0
    assert_equals_twin([[g]])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.sanitizer),
        torch.float16,
        torch.float64,
    ],
)
def test_misaligned_starts_and_ends(device: KernelDevice, dtype: torch.dtype) -> None:
    base = gradient(device, 3 * CHUNK, dtype=dtype)
    stops = (10, 11, 100, 3 * CHUNK - 1)
    assert_equals_twin([[base[start:stop]] for start in range(9) for stop in stops])


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=pytest.mark.sanitizer),
        torch.bfloat16,
        torch.float16,
        torch.float64,
    ],
)
def test_groups_with_none_and_empty_members(
    device: KernelDevice, dtype: torch.dtype
) -> None:
    empty = torch.empty(0, 3, dtype=dtype, device=device.torch)
    first = [
        gradient(device, 3, 5, dtype=dtype),
        None,
        empty,
        gradient(device, 100, seed=1, dtype=dtype),
        empty,
    ]
    assert_equals_twin(
        [first, [], [None], [empty], [gradient(device, 2, 2, seed=2, dtype=dtype)], []]
    )


@pytest.mark.sanitizer
def test_only_empty_gradients(device: KernelDevice) -> None:
    stats = grad_stats([[torch.empty(0, device=device.torch)], []])
    assert stats.tensors.tolist() == [0, 0]
    assert stats.health.tolist() == [0, 0]
    assert stats.clip_coef.tolist() == [1, 1]


def test_dtypes_may_differ_between_gradients(device: KernelDevice) -> None:
    mixed = [
        gradient(device, 300, seed=i, dtype=dtype) for i, dtype in enumerate(DTYPES)
    ]
    assert_equals_twin([mixed, [gradient(device, 5)]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_storage_of_every_kind(device: KernelDevice, dtype: torch.dtype) -> None:
    base = gradient(device, 4, 8, 6, 10, dtype=dtype)
    assert_equals_twin(
        [
            [base.to(memory_format=torch.channels_last)],
            [base.transpose(1, 3)],
            [base.flatten()[::2]],
        ]
    )
    assert_equals_twin(
        [[base[1:3, 2:5]], [base[:, :1].expand(4, 8, 6, 10)], [base.sum()]]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf(device: KernelDevice, dtype: torch.dtype) -> None:
    bad = gradient(device, 3 * CHUNK, dtype=dtype)
    bad[5] = math.nan
    bad[CHUNK + 1 : CHUNK + 4] = math.inf
    bad[-1] = -math.inf
    infinite = gradient(device, 50, dtype=dtype)
    infinite[7] = -math.inf
    assert_equals_twin(
        [
            [gradient(device, 20, seed=1), bad],
            [infinite],
            [gradient(device, 20, seed=2)],
        ]
    )
    assert grad_stats([[bad], [infinite]]).clip_coef.tolist() == [0, 0]


@pytest.mark.trap(42)
@pytest.mark.parametrize("value", [1e20, 3e38, 1e-30, 1e-38, 1e-45])
def test_entries_whose_squares_do_not_fit_float32(
    device: KernelDevice, value: float
) -> None:
    g = torch.full((3 * CHUNK + 1,), value, device=device.torch)
    exact = g[0].item() * math.sqrt(g.numel())
    assert grad_stats([[g]]).norm.item() == pytest.approx(exact, rel=1e-9)


# 128 and 1024 tensors fill a table. The last block takes 8 tensors and 8 groups at a time, and 32 tensors of a group.
@pytest.mark.parametrize(
    "count", [127, 128, pytest.param(129, marks=pytest.mark.sanitizer), 1024, 1025]
)
def test_more_tensors_than_one_table_holds(device: KernelDevice, count: int) -> None:
    tensors: list[Tensor | None] = [
        gradient(device, 1 + i % 50, seed=i) for i in range(count)
    ]
    tensors[count // 2] = torch.empty(0, device=device.torch)
    assert_equals_twin([tensors[:100], [], *([tensor] for tensor in tensors[100:])])


def test_same_bits_every_time_and_with_out(device: KernelDevice) -> None:
    groups = [
        [gradient(device, 100_003, seed=1), gradient(device, 7, seed=2)],
        [gradient(device, 100, 1000, seed=3)],
    ]
    first = grad_stats(groups)
    out = grad_stats(groups)
    for _ in range(10):
        again = grad_stats(groups)
        grad_stats(groups, out=out)
        for stats in (again, out):
            assert torch.equal(first.fields, stats.fields)
            assert torch.equal(first.norms, stats.norms)
    assert_equals_twin(groups)


@pytest.mark.parametrize("count", [1, 128, 300])
def test_one_kernel(device: KernelDevice, count: int) -> None:
    groups = [[gradient(device, 100, seed=i) for i in range(count)]]
    out = grad_stats(groups)
    grad_stats(groups, out=out)  # makes the scratch memory
    launched = device.launched(lambda: grad_stats(groups, out=out))
    assert len(launched) == 1, launched


@pytest.mark.parametrize("count", [5, 130])
def test_a_captured_call_can_be_replayed_on_new_values(
    device: KernelDevice, count: int
) -> None:
    gradients = [gradient(device, 100 + i, seed=i) for i in range(count)]
    out = grad_stats([gradients])
    grad_stats([gradients], out=out)  # makes the scratch memory before the capture
    replay = device.captured(lambda: grad_stats([gradients], out=out))
    for turn in range(3):
        for i, tensor in enumerate(gradients):
            tensor.copy_(gradient(device, 100 + i, seed=1000 * turn + i))
        replay()
        expected = grad_stats([gradients])
        assert torch.equal(out.fields, expected.fields)
        assert torch.equal(out.norms, expected.norms)


def test_out_for_smaller_gradients_is_refused(device: KernelDevice) -> None:
    out = grad_stats([[gradient(device, 10)]])
    grad_stats([[gradient(device, 10)]], out=out)
    with pytest.raises(RuntimeError, match="made for smaller gradients"):
        grad_stats([[gradient(device, 10 * CHUNK)]], out=out)


def test_opcheck(device: KernelDevice) -> None:
    gradients = [
        gradient(device, 3, 5),
        gradient(device, 40, seed=1, dtype=torch.bfloat16),
        torch.empty(0, device=device.torch),
    ]
    torch.library.opcheck(
        torch.ops.esper.grad_stats.default, (gradients, [1, 2, 0], 1.0, 10.0)
    )
