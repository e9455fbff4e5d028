"""`cross_entropy` on CUDA: equal to its twin, deterministic, few launches, no sync, safe in a replayed graph."""

import pytest
import torch
from torch import Tensor

from esper.ops import Accumulators, accumulate_, cross_entropy, cross_entropy_into
from tests.ops.cross_entropy_twin import cross_entropy_twin, difficult_rows

pytestmark = pytest.mark.cuda

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT32_LOSS = {"rtol": 5e-6, "atol": 5e-6}
LOSS_TOLERANCE = {torch.float64: {"rtol": 1e-11, "atol": 1e-11}}
GRADIENT_TOLERANCE = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-13},
    torch.float32: {"rtol": 1e-5, "atol": 1e-7},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-7},
    torch.float16: {"rtol": 2**-10, "atol": 1e-7},
}


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of this shape and targets: a third of them right, a quarter ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    targets.view(-1)[::3] = logits.argmax(dim=-1).view(-1)[::3]
    targets.view(-1)[2::4] = -100
    return logits.cuda(), targets.cuda()


def assert_equals_twin(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> None:
    own = logits.detach().clone().requires_grad_()
    other = logits.detach().cpu().double().requires_grad_()
    result = cross_entropy(own, targets, label_smoothing=label_smoothing)
    loss, correct, stats = cross_entropy_twin(other, targets.cpu(), label_smoothing=label_smoothing)
    tolerance = LOSS_TOLERANCE.get(logits.dtype, FLOAT32_LOSS)
    torch.testing.assert_close(result.loss.detach().double().cpu(), loss.detach(), equal_nan=True, **tolerance)
    torch.testing.assert_close(result.stats.cpu(), stats, equal_nan=True, **tolerance)
    assert torch.equal(result.stats[1:].cpu(), stats[1:])
    assert torch.equal(result.correct.cpu(), correct)
    (3 * result.loss).backward()
    (3 * loss).backward()
    assert own.grad is not None
    assert other.grad is not None
    gradient = {name: 3 * value for name, value in GRADIENT_TOLERANCE[logits.dtype].items()}
    torch.testing.assert_close(own.grad.double().cpu(), other.grad, equal_nan=True, **gradient)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 2, 10, 64, 65, 256, 257, 1000, 4096, 4097, 9000])
@pytest.mark.parametrize("rows", [1, 31, 300])
def test_sizes_around_warps_and_blocks(dtype: torch.dtype, classes: int, rows: int) -> None:
    assert_equals_twin(*sample(rows, classes, dtype=dtype, seed=rows))
    assert_equals_twin(*sample(rows, classes, dtype=dtype, seed=rows), label_smoothing=0.1)


@pytest.mark.parametrize("shape", [(200_000, 10), (300_000, 3), (20_000, 100), (3, 700, 65), (2, 3, 50_257)])
def test_many_blocks(shape: tuple[int, ...]) -> None:
    assert_equals_twin(*sample(*shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [3, 10, 100, 5000])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_extremes_ties_and_what_is_not_finite(dtype: torch.dtype, classes: int, label_smoothing: float) -> None:
    rows = difficult_rows(classes).to(dtype).cuda()
    for target in (0, classes // 2, classes - 1):
        for row in rows:
            assert_equals_twin(row[None], torch.tensor([target], device="cuda"), label_smoothing)


@pytest.mark.parametrize("shape", [(0, 10), (0, 4, 10), (4, 0, 10)])
def test_empty_batches(shape: tuple[int, ...]) -> None:
    logits = torch.zeros(shape, device="cuda", requires_grad=True)
    result = cross_entropy(logits, torch.zeros(shape[:-1], dtype=torch.int64, device="cuda"))
    assert result.loss.isnan()
    assert result.stats.tolist() == [0, 0, 0, 1, 0]
    result.loss.backward()
    assert logits.grad is not None
    assert logits.grad.shape == shape


@pytest.mark.parametrize("classes", [10, 300, 5000])
def test_a_target_that_is_no_class_is_not_finite(classes: int) -> None:
    logits, targets = sample(4, classes)
    targets[:] = torch.tensor([0, classes, -1, 1])
    logits.requires_grad_()
    result = cross_entropy(logits, targets)
    assert result.stats[4] == 2
    assert result.loss.isnan()
    result.loss.backward()
    assert logits.grad is not None
    assert logits.grad.isnan().all(dim=1).tolist() == [False, True, True, False]


def test_into_writes_what_the_functional_form_returns() -> None:
    for shape in ((40, 10), (40, 300), (4000, 10), (30, 50_000)):
        accumulators = Accumulators(2, 2, shape[0] + 5, device="cuda")
        case = sample(*shape)
        result = cross_entropy(*case)
        cross_entropy_into(*case, accumulators, 1, 0, first=3)
        accumulate_(accumulators, 1, result.stats, configuration=1)
        assert torch.equal(accumulators.block[1, 0], result.stats)
        assert torch.equal(accumulators.block[1, 1], result.stats)
        assert torch.equal(accumulators.correct[1, 0, 3 : 3 + shape[0]], result.correct)
        assert accumulators.correct.sum() == result.correct.sum()
        assert not accumulators.block[0].any()


def test_into_counts_the_right_tokens_of_each_sequence() -> None:
    for shape in ((4, 30, 5), (3, 700, 65), (40, 3, 2000)):
        accumulators = Accumulators(1, 1, shape[0], language=True, device="cuda")
        case = sample(*shape)
        result = cross_entropy(*case)
        cross_entropy_into(*case, accumulators, 0, first=0)
        assert torch.equal(accumulators.correct[0, 0].long(), result.correct.long().sum(dim=1))
        assert torch.equal(accumulators.read().block[0, 0], result.stats.cpu())


def test_same_bits_every_time() -> None:
    case = sample(100_000, 10)
    first = cross_entropy(*case)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, cross_entropy(*case), strict=True))


@pytest.mark.parametrize("shape", [(512, 10), (4096, 10), (128, 100), (64, 50_257)])
def test_at_most_three_kernels_and_no_sync(shape: tuple[int, int]) -> None:
    logits, targets = sample(*shape)
    logits.requires_grad_()
    accumulators = Accumulators(1, device="cuda")
    ones = torch.ones((), device="cuda")  # or autograd would launch a fill of its own

    def step() -> None:
        result = cross_entropy(logits, targets)
        torch.autograd.grad(result.loss, logits, ones)
        accumulate_(accumulators, 0, result.stats)

    step()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    launched = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in launched if "Memset" not in event.name]
    assert len(kernels) == 3, [event.name for event in launched]
    if shape == (512, 10):  # one block, so no scratch memory either
        assert len(launched) == 3


@pytest.mark.parametrize("shape", [(512, 10), (4096, 10), (40, 3000)])
def test_a_captured_graph_can_be_replayed_on_new_values(shape: tuple[int, int]) -> None:
    logits, targets = sample(*shape)
    logits.requires_grad_()
    accumulators = Accumulators(1, 1, shape[0], device="cuda")
    ones = torch.ones((), device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        result = cross_entropy(logits, targets)
        (gradient,) = torch.autograd.grad(result.loss, logits, ones)
        accumulate_(accumulators, 0, result.stats)
        cross_entropy_into(logits, targets, accumulators, 0, first=0)
        return result.stats, gradient

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats, gradient = step()
    for replay in range(1, 4):
        values, new_targets = sample(*shape, seed=replay)
        with torch.no_grad():
            logits.copy_(values)
        targets.copy_(new_targets)
        accumulators.zero_()
        graph.replay()
        expected = cross_entropy(logits, targets)
        (expected_gradient,) = torch.autograd.grad(expected.loss, logits, ones)
        assert torch.equal(stats, expected.stats)
        assert torch.equal(gradient, expected_gradient)
        assert torch.equal(accumulators.block[0, 0], 2 * expected.stats)
        assert torch.equal(accumulators.correct[0, 0], expected.correct)


def test_tensors_on_two_devices_are_refused() -> None:
    logits, targets = sample(8, 10)
    with pytest.raises(RuntimeError, match="logits and targets are on different devices"):
        cross_entropy(logits, targets.cpu())
    with pytest.raises(RuntimeError, match="block is on another device"):
        cross_entropy_into(logits, targets, Accumulators(1), 0)


def test_gradcheck_and_opcheck() -> None:
    logits, targets = sample(5, 4, dtype=torch.float64)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets).loss, (logits,))
    torch.library.opcheck(torch.ops.esper.cross_entropy.default, (logits, targets, -100, 0.1))
