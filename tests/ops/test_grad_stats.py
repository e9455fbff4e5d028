"""`grad_stats`: equal to its twin for every kind of gradient, and the same bits every time.

Tests that take ``device`` run on the CPU here; tests/cuda runs them with the CUDA kernel, too.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.ops.grad_stats import FIELDS, VANISHING_NORM, GradStats, grad_stats
from tests.cuda.cases import with_sanitizer
from tests.emulation.device import KernelDevice
from tests.ops.twins import grad_stats_twin

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# float32 block sums of 2048 squares; see csrc/cpu/grad_stats.cpp.
RTOL = 2e-6
BLOCK = 2048
CHUNK = 8192
"""Elements that a block of threads of the CUDA kernel takes at a time."""
SIZES = (
    *(1, 3, 4, 5, 8, 9, 15, 16, 17, 63, 64, 65, 1023, 1025),
    *(BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1),
)
SANITIZED_SIZES = (
    (torch.float32, 1),
    (torch.bfloat16, 9),
    (torch.float64, CHUNK - 1),
    (torch.float16, CHUNK + 1),
    (torch.float32, 40 * CHUNK + 5),
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def sizes_and_dtypes() -> list[tuple[torch.dtype, int]]:
    """Each size with two of the types."""
    pairs = list(SANITIZED_SIZES)
    for place, size in enumerate(SIZES):
        pairs.append((DTYPES[place % 4], size))
        pairs.append((DTYPES[(place // 4 + place + 1) % 4], size))
    return list(dict.fromkeys(pairs))


def gradient(
    *shape: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    on: KernelDevice | None = None,
) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(on.torch if on else "cpu", dtype)


def assert_equals_twin(
    groups: list[list[Tensor | None]],
    max_norm: float = 1.0,
    exploding_norm: float = 10.0,
) -> None:
    stats = grad_stats(groups, max_norm, exploding_norm)
    on_cpu = [[g if g is None else g.cpu() for g in group] for group in groups]
    expected = grad_stats_twin(on_cpu, max_norm, exploding_norm)
    for own, twin in zip((stats.fields, stats.norms), expected, strict=True):
        torch.testing.assert_close(own.cpu(), twin, rtol=RTOL, atol=0, equal_nan=True)


def test_gradients_vanish_below_the_documented_norm() -> None:
    norms = [VANISHING_NORM * factor for factor in (0.0, 0.999, 1.001, 2.0)]
    stats = grad_stats([[torch.tensor([norm])] for norm in norms], 1.0, 10.0)
    assert stats.vanishing.tolist() == [1, 1, 0, 0]


@pytest.mark.finding("M7")
def test_a_groups_norm_is_global_and_its_tensors_are_measured_apart() -> None:
    # Group 0: norms 5 and 12, together 13. Group 1: 8 vanishing elements of 1e-9. Clip to 6.5.
    stats = grad_stats(
        [
            [torch.tensor([3.0, 4.0]), torch.tensor([[0.0, 12.0]])],
            [torch.full((8,), 1e-9)],
        ],
        6.5,
        10.0,
    )
    assert stats.norms.tolist() == pytest.approx(
        [5.0, 12.0, math.sqrt(8) * 1e-9], rel=1e-6
    )
    assert stats.sum_sq.tolist() == pytest.approx([169.0, 8e-18], rel=1e-6)
    assert stats.norm.tolist() == pytest.approx([13.0, math.sqrt(8) * 1e-9], rel=1e-6)
    assert stats.tensors.tolist() == [2, 1]
    assert stats.elements.tolist() == [4, 8]
    assert stats.min_norm[0] == 5
    assert stats.max_norm[0] == 12
    assert stats.vanishing.tolist() == [0, 1]
    assert stats.exploding.tolist() == [1, 0]
    assert stats.zero.tolist() == [1, 0]
    assert stats.nan.tolist() == stats.inf.tolist() == [0, 0]
    assert stats.health.tolist() == pytest.approx([1 - 0.8 / 2, 0.5])
    assert stats.clip_coef.tolist() == pytest.approx([0.5, 1.0], rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "n"), with_sanitizer(sizes_and_dtypes(), SANITIZED_SIZES)
)
def test_sizes_around_vectors_and_chunks(
    device: KernelDevice, dtype: torch.dtype, n: int
) -> None:
    g = gradient(n, seed=n, dtype=dtype, on=device)
    g[::3] = 0
    assert_equals_twin([[g]])


@pytest.mark.sanitizer
@every_dtype
def test_groups_with_none_and_empty_members(
    device: KernelDevice, dtype: torch.dtype
) -> None:
    empty = torch.empty(0, 3, dtype=dtype, device=device.torch)
    first, second = (gradient(n, seed=n, dtype=dtype, on=device) for n in (15, 100))
    last = gradient(2, 2, seed=2, dtype=dtype, on=device)
    groups = [[first, None, empty, second, empty], [], [None], [empty], [last], []]
    assert_equals_twin(groups)
    stats = grad_stats(groups)
    assert stats.norms.shape == (6,)  # None is left out, the empty ones are not
    # Not measured is not passed, and there is nothing to clip.
    assert stats.tensors.tolist() == [2, 0, 0, 0, 1, 0]
    assert stats.health[1:4].tolist() == [0, 0, 0]
    assert stats.clip_coef[1:4].tolist() == [1, 1, 1]
    assert stats.norm[1:4].tolist() == [0, 0, 0]


@pytest.mark.finding("M7")
def test_no_groups_and_no_gradients() -> None:
    assert grad_stats([]).fields.shape == (0, len(FIELDS))
    stats = grad_stats([[None], []])
    assert stats.fields.shape == (2, len(FIELDS))
    assert stats.norms.shape == (0,)
    torch.testing.assert_close(stats.fields, grad_stats_twin([[None], []])[0])


def test_dtypes_may_differ_between_gradients(device: KernelDevice) -> None:
    mixed = []
    for seed, dtype in enumerate(DTYPES):
        mixed.append(gradient(300, seed=seed, dtype=dtype, on=device))
    assert_equals_twin([mixed, [gradient(5, on=device)]])


@every_dtype
def test_storage_of_every_kind(device: KernelDevice, dtype: torch.dtype) -> None:
    base = gradient(4, 8, 6, 10, dtype=dtype, on=device)
    number = torch.full((), 2.0, dtype=dtype, device=device.torch)
    views = (
        base.to(memory_format=torch.channels_last),
        base.transpose(1, 3),
        base.flatten()[3:777],  # misaligned
        base.flatten()[::2],
        base[1:3, 2:5],
        base[:, :1].expand(4, 8, 6, 10),
        number.expand(1000),
        number,
    )
    for view in views:
        assert_equals_twin([[view]])


@every_dtype
@pytest.mark.parametrize("position", [0, BLOCK + 10, 3 * CHUNK - 1])
def test_nan_and_inf_are_counted_and_make_the_group_unusable(
    device: KernelDevice, dtype: torch.dtype, position: int
) -> None:
    bad = gradient(3 * CHUNK, dtype=dtype, on=device)
    bad[position] = math.nan
    bad[100:103] = math.inf
    bad[103] = -math.inf
    bad[200:210] = 0
    infinite = gradient(50, dtype=dtype, on=device)
    infinite[7] = -math.inf
    good = gradient(20, seed=1, on=device)
    groups: list[list[Tensor | None]] = [[good, bad], [infinite], [good]]
    assert_equals_twin(groups)
    stats = grad_stats(groups)
    assert stats.nan.tolist() == [1, 0, 0]
    assert stats.inf.tolist() == [4, 1, 0]
    assert stats.exploding.tolist() == [1, 1, 0]
    assert stats.health.tolist() == [0, 0, 1]
    # 0, not NaN: a step can tell "skip" from every usable coefficient, which is above 0.
    assert stats.clip_coef[:2].tolist() == [0, 0]
    assert stats.clip_coef[2] > 0


@pytest.mark.trap(42)
@pytest.mark.parametrize("value", [1e20, 3e38, 1e-30, 1e-38, 1e-45, -1e20])
def test_entries_whose_squares_do_not_fit_float32(
    device: KernelDevice, value: float
) -> None:
    # 1e20 squared overflows float32 and 1e-30 squared underflows; in float64 both are fine.
    for n in (1, 48, 3 * CHUNK + 1):
        g = torch.full((n,), value, device=device.torch)
        assert_equals_twin([[g]])
        exact = abs(g[0].item()) * math.sqrt(n)
        assert grad_stats([[g]]).norm.item() == pytest.approx(exact, rel=1e-9)


def test_huge_and_tiny_blocks_in_one_tensor() -> None:
    g = gradient(4 * BLOCK)
    g[:BLOCK] *= 1e25
    g[2 * BLOCK : 3 * BLOCK] *= 1e-28
    g[3 * BLOCK :] = 0
    assert_equals_twin([[g], [g[BLOCK:]], [g[2 * BLOCK :]], [g[3 * BLOCK :]]])


def test_every_float16_value() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    stats = grad_stats([[value.clone() for value in every[every.isfinite()].split(1)]])
    torch.testing.assert_close(
        stats.norms, every[every.isfinite()].double().abs(), rtol=1e-7, atol=0
    )
    assert grad_stats([[every]]).nan.item() == every.isnan().sum()
    assert grad_stats([[every]]).inf.item() == 2
    assert grad_stats([[every]]).zero.item() == 2


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_groups_equal_the_twin(data: st.DataObject) -> None:
    values = st.floats(width=32, allow_nan=True, allow_infinity=True)
    tensors = st.builds(
        lambda items, dtype: torch.tensor(items, dtype=torch.float32).to(dtype),
        st.lists(values, max_size=70),
        st.sampled_from(DTYPES),
    )
    groups = data.draw(st.lists(st.lists(st.none() | tensors, max_size=4), max_size=4))
    max_norm = data.draw(st.floats(1e-3, 1e3))
    exploding = data.draw(st.floats(1e-3, 1e3))
    assert_equals_twin(groups, max_norm, exploding)


def test_same_bits_for_any_number_of_threads() -> None:
    # 1.3M elements: well above where the kernel goes parallel.
    groups = [
        [gradient(300_001, seed=1), gradient(7, seed=2)],
        [gradient(1000, 1000, seed=3)],
    ]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = grad_stats(groups)
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            for _ in range(3):
                many = grad_stats(groups)
                assert torch.equal(alone.fields, many.fields)
                assert torch.equal(alone.norms, many.norms)
    finally:
        torch.set_num_threads(before)
    assert_equals_twin(groups)


@pytest.mark.finding("M7")
def test_iterators_are_read_once() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4))]
    parameters[0].grad = torch.tensor([1.0, 2.0, 2.0])

    def groups() -> Iterator[Iterator[Tensor | None]]:
        yield (parameter.grad for parameter in parameters)
        yield iter([torch.ones(4)])

    stats = grad_stats(groups())
    assert stats.norm.tolist() == [3, 2]
    assert stats.tensors.tolist() == [1, 1]


def test_out_is_overwritten_in_place() -> None:
    out = grad_stats([[torch.zeros(4)], [torch.zeros(2, 2)]])
    fields, norms, clip = out.fields.data_ptr(), out.norms.data_ptr(), out.clip_coef
    returned = grad_stats(
        [[torch.full((4,), 3.0)], [torch.ones(2, 2)]], max_norm=1.5, out=out
    )
    assert returned is out
    assert (out.fields.data_ptr(), out.norms.data_ptr()) == (fields, norms)
    assert out.norm.tolist() == [6, 2]
    assert clip.tolist() == pytest.approx(
        [0.25, 0.75], rel=1e-6
    )  # a view taken before sees the new values


@pytest.mark.finding("M7")
def test_the_clip_coefficient_equals_torchs() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(50)) for _ in range(3)]
    for i, parameter in enumerate(parameters):
        parameter.grad = gradient(50, seed=i)
    stats = grad_stats([[p.grad for p in parameters]], max_norm=2.0)
    expected = [p.grad * stats.clip_coef for p in parameters if p.grad is not None]
    torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    for parameter, clipped in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, clipped.float())
    assert grad_stats([[gradient(10)]], max_norm=math.inf).clip_coef.item() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([[torch.ones(3, dtype=torch.int64)]],),
            "gradient 0 must be float32, bfloat16, float16 or float64",
        ),
        (
            ([[torch.ones(3), torch.ones(3, dtype=torch.complex64)]],),
            "gradient 1 must be float32",
        ),
        (([[torch.ones(3)]], 0.0), "max_norm must be positive, got 0"),
        (([[torch.ones(3)]], math.nan), "max_norm must be positive, got nan"),
        (([[torch.ones(3)]], 1.0, -1.0), "exploding_norm must be positive, got -1"),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^grad_stats: {message}"):
        grad_stats(*arguments)  # type: ignore[arg-type]


def test_out_of_other_sizes_is_refused() -> None:
    out = grad_stats([[torch.ones(3)]])
    with pytest.raises(
        RuntimeError, match=r"this call needs fields \[1, 13\] and norms \[2\]"
    ):
        grad_stats([[torch.ones(3), torch.ones(3)]], out=out)
    with pytest.raises(RuntimeError, match="`fields` must be contiguous float64"):
        grad_stats(
            [[torch.ones(3)]],
            out=GradStats(torch.empty(1, 13), torch.empty(1, dtype=torch.float64)),
        )


def test_group_sizes_must_add_up() -> None:
    with pytest.raises(
        RuntimeError, match="group_sizes add up to 3 but there are 1 gradients"
    ):
        torch.ops.esper.grad_stats([torch.ones(3)], [3], 1.0, 10.0)
    with pytest.raises(RuntimeError, match="group 1 has a negative size"):
        torch.ops.esper.grad_stats([torch.ones(3)], [2, -1], 1.0, 10.0)


def test_without_gradients_the_result_is_on_the_given_device() -> None:
    assert grad_stats([[None], []]).fields.device.type == "cpu"
    stats = grad_stats([[None], []], device="meta")
    assert (stats.fields.device.type, stats.fields.shape) == ("meta", (2, len(FIELDS)))
    assert grad_stats([[torch.ones(2)]], device="meta").norm.tolist() == [
        math.sqrt(2)
    ]  # the gradients' device
