"""`grad_stats` on CUDA: equal to its twin, deterministic, one launch, no sync, safe in a replayed graph."""

import math

import pytest
import torch
from torch import Tensor

from esper.ops import grad_stats
from tests.ops.twins import grad_stats_twin

pytestmark = pytest.mark.cuda

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RTOL = 2e-6
CHUNK = 8192


def gradient(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def assert_equals_twin(groups: list[list[Tensor | None]]) -> None:
    stats = grad_stats(groups)
    fields, norms = grad_stats_twin([[g if g is None else g.cpu() for g in group] for group in groups])
    torch.testing.assert_close(stats.fields.cpu(), fields, rtol=RTOL, atol=0, equal_nan=True)
    torch.testing.assert_close(stats.norms.cpu(), norms, rtol=RTOL, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 9, 1023, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 40 * CHUNK + 5])
def test_sizes_around_vectors_and_chunks(dtype: torch.dtype, n: int) -> None:
    g = gradient(n, seed=n, dtype=dtype)
    g[::3] = 0
    assert_equals_twin([[g]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_starts_and_ends(dtype: torch.dtype) -> None:
    base = gradient(3 * CHUNK, dtype=dtype)
    stops = (10, 11, 100, 3 * CHUNK - 1)
    assert_equals_twin([[base[start:stop]] for start in range(9) for stop in stops])


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_with_none_and_empty_members(dtype: torch.dtype) -> None:
    empty = torch.empty(0, 3, dtype=dtype, device="cuda")
    first = [gradient(3, 5, dtype=dtype), None, empty, gradient(100, seed=1, dtype=dtype), empty]
    assert_equals_twin([first, [], [None], [empty], [gradient(2, 2, seed=2, dtype=dtype)], []])


def test_only_empty_gradients() -> None:
    stats = grad_stats([[torch.empty(0, device="cuda")], []])
    assert stats.tensors.tolist() == [0, 0]
    assert stats.health.tolist() == [0, 0]
    assert stats.clip_coef.tolist() == [1, 1]


def test_dtypes_may_differ_between_gradients() -> None:
    assert_equals_twin([[gradient(300, seed=i, dtype=dtype) for i, dtype in enumerate(DTYPES)], [gradient(5)]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_storage_of_every_kind(dtype: torch.dtype) -> None:
    base = gradient(4, 8, 6, 10, dtype=dtype)
    assert_equals_twin([[base.to(memory_format=torch.channels_last)], [base.transpose(1, 3)], [base.flatten()[::2]]])
    assert_equals_twin([[base[1:3, 2:5]], [base[:, :1].expand(4, 8, 6, 10)], [base.sum()]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf(dtype: torch.dtype) -> None:
    bad = gradient(3 * CHUNK, dtype=dtype)
    bad[5] = math.nan
    bad[CHUNK + 1 : CHUNK + 4] = math.inf
    bad[-1] = -math.inf
    infinite = gradient(50, dtype=dtype)
    infinite[7] = -math.inf
    assert_equals_twin([[gradient(20, seed=1), bad], [infinite], [gradient(20, seed=2)]])
    assert grad_stats([[bad], [infinite]]).clip_coef.tolist() == [0, 0]


@pytest.mark.parametrize("value", [1e20, 3e38, 1e-30, 1e-38, 1e-45])
def test_trap_42_entries_whose_squares_do_not_fit_float32(value: float) -> None:
    g = torch.full((3 * CHUNK + 1,), value, device="cuda")
    exact = g[0].item() * math.sqrt(g.numel())
    assert grad_stats([[g]]).norm.item() == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("count", [127, 128, 129, 1000, 1024, 1025, 2500])
def test_more_tensors_than_one_table_holds(count: int) -> None:
    tensors: list[Tensor | None] = [gradient(1 + i % 50, seed=i) for i in range(count)]
    tensors[count // 2] = torch.empty(0, device="cuda")
    assert_equals_twin([tensors[:100], [], tensors[100:]])
    assert_equals_twin([[tensor] for tensor in tensors])


def test_same_bits_every_time_and_with_out() -> None:
    groups = [[gradient(1_000_003, seed=1), gradient(7, seed=2)], [gradient(1000, 1000, seed=3)]]
    first = grad_stats(groups)
    out = grad_stats(groups)
    for _ in range(20):
        again = grad_stats(groups)
        grad_stats(groups, out=out)
        for stats in (again, out):
            assert torch.equal(first.fields, stats.fields)
            assert torch.equal(first.norms, stats.norms)
    assert_equals_twin(groups)


def test_no_host_sync_and_no_allocation_with_out() -> None:
    groups = [[gradient(100_000), gradient(10)]]
    out = grad_stats(groups)
    grad_stats(groups, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grad_stats(groups)
        counted = torch.cuda.memory_stats()["allocation.all.allocated"]
        grad_stats(groups, out=out)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert counted > before  # the count does see allocations
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == counted


@pytest.mark.parametrize("count", [3, 1000])
def test_one_kernel(count: int) -> None:
    groups = [[gradient(48, seed=i) for i in range(count)]]
    out = grad_stats(groups)
    grad_stats(groups, out=out)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        grad_stats(groups, out=out)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [event.name for event in kernels]


@pytest.mark.parametrize("count", [5, 300])
def test_a_captured_graph_can_be_replayed_on_new_values(count: int) -> None:
    gradients = [gradient(100 + i, seed=i) for i in range(count)]
    out = grad_stats([gradients])
    grad_stats([gradients], out=out)  # makes the scratch memory before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grad_stats([gradients], out=out)
    for replay in range(4):
        for i, tensor in enumerate(gradients):
            tensor.copy_(gradient(100 + i, seed=1000 * replay + i))
        graph.replay()
        expected = grad_stats([gradients])
        assert torch.equal(out.fields, expected.fields)
        assert torch.equal(out.norms, expected.norms)


def test_runs_on_the_current_stream() -> None:
    g = torch.zeros(4_000_000, device="cuda")
    out = grad_stats([[g]])
    grad_stats([[g]], out=out)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on another stream the kernel would not wait for this and see zeros
        g.fill_(2.0)
        grad_stats([[g]], out=out)
    stream.synchronize()
    assert out.norm.item() == 4000


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_gradients_device() -> None:
    stats = grad_stats([[torch.ones(4, device="cuda:1")]])
    assert stats.fields.device == torch.device("cuda:1")
    assert stats.norm.item() == 2


def test_gradients_on_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="gradient 1 is on another device"):
        grad_stats([[torch.ones(3, device="cuda"), torch.ones(3)]])


def test_out_for_smaller_gradients_is_refused() -> None:
    out = grad_stats([[gradient(10)]])
    grad_stats([[gradient(10)]], out=out)
    with pytest.raises(RuntimeError, match="made for smaller gradients"):
        grad_stats([[gradient(10 * CHUNK)]], out=out)


def test_opcheck() -> None:
    gradients = [gradient(3, 5), gradient(40, seed=1, dtype=torch.bfloat16), torch.empty(0, device="cuda")]
    torch.library.opcheck(torch.ops.esper.grad_stats.default, (gradients, [1, 2, 0], 1.0, 10.0))
