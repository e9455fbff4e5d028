"""The CUDA kernel of `grad_stats`, on a GPU or emulated: the tests of the CPU kernel, tables, launches and captures."""

import pytest
import torch
from torch import Tensor

from esper.ops.grad_stats import grad_stats
from tests.emulation.device import KernelDevice
from tests.ops.test_grad_stats import (  # noqa: F401  the tests run with this kernel, too
    CHUNK,
    assert_equals_twin,
    gradient,
    test_dtypes_may_differ_between_gradients,
    test_groups_with_none_and_empty_members,
    test_nan_and_inf_are_counted_and_make_the_group_unusable,
    test_sizes_around_vectors_and_chunks,
    test_storage_of_every_kind,
)
from tests.ops.test_grad_stats import (
    test_entries_whose_squares_do_not_fit_float32 as entries_do_not_fit,
)


@pytest.mark.trap(42)
@pytest.mark.parametrize("value", [1e20, 1e-45])
def test_entries_whose_squares_do_not_fit_float32(
    device: KernelDevice, value: float
) -> None:
    entries_do_not_fit(device, value)


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
    base = gradient(3 * CHUNK, dtype=dtype, on=device)
    stops = (10, 11, 100, 3 * CHUNK - 1)
    assert_equals_twin([[base[start:stop]] for start in range(9) for stop in stops])


# 128 and 1024 tensors fill a table. The last block takes 8 tensors and 8 groups at a time, and 32 tensors of a group.
@pytest.mark.parametrize(
    "count",
    [
        127,
        128,
        pytest.param(129, marks=pytest.mark.sanitizer),
        pytest.param(1024, marks=pytest.mark.slow),
        pytest.param(1025, marks=pytest.mark.slow),
    ],
)
def test_more_tensors_than_one_table_holds(device: KernelDevice, count: int) -> None:
    tensors: list[Tensor | None] = [
        gradient(1 + i % 50, seed=i, on=device) for i in range(count)
    ]
    tensors[count // 2] = torch.empty(0, device=device.torch)
    assert_equals_twin([tensors[:100], [], *([tensor] for tensor in tensors[100:])])


def test_same_bits_every_time_and_with_out(device: KernelDevice) -> None:
    groups = [
        [gradient(100_003, seed=1, on=device), gradient(7, seed=2, on=device)],
        [gradient(100, 1000, seed=3, on=device)],
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
    groups = [[gradient(100, seed=i, on=device) for i in range(count)]]
    out = grad_stats(groups)
    grad_stats(groups, out=out)  # makes the scratch memory
    launched = device.launched(lambda: grad_stats(groups, out=out))
    assert len(launched) == 1, launched


@pytest.mark.parametrize("count", [5, 130])
def test_a_captured_call_can_be_replayed_on_new_values(
    device: KernelDevice, count: int
) -> None:
    gradients = [gradient(100 + i, seed=i, on=device) for i in range(count)]
    out = grad_stats([gradients])
    grad_stats([gradients], out=out)  # makes the scratch memory before the capture
    replay = device.captured(lambda: grad_stats([gradients], out=out))
    for turn in range(3):
        for i, tensor in enumerate(gradients):
            tensor.copy_(gradient(100 + i, seed=1000 * turn + i, on=device))
        replay()
        expected = grad_stats([gradients])
        assert torch.equal(out.fields, expected.fields)
        assert torch.equal(out.norms, expected.norms)


def test_out_for_smaller_gradients_is_refused(device: KernelDevice) -> None:
    out = grad_stats([[gradient(10, on=device)]])
    grad_stats([[gradient(10, on=device)]], out=out)
    with pytest.raises(RuntimeError, match="made for smaller gradients"):
        grad_stats([[gradient(10 * CHUNK, on=device)]], out=out)
