"""Properties of kernels that only a GPU shows: syncs, streams, allocation, graphs that own memory, devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from esper.ops.accumulators import Accumulators, accumulate_
from esper.ops.cross_entropy import cross_entropy, cross_entropy_into
from esper.ops.grad_stats import grad_stats
from esper.ops.norm_relu_pool import NormReluPool, norm_relu_pool
from esper.ops.optimizer import SGD, AdamW, step_all
from esper.ops.stage_batch import normalisation_table, stage_images
from tests.emulation.device import GPU
from tests.ops.norm_relu_pool_cases import (
    DTYPES,
    assert_equals_twin,
    assert_same_bits,
    by_operator,
    case,
)
from tests.ops.test_cross_entropy import (
    assert_equals_twin as assert_equals_cross_entropy_twin,
)
from tests.ops.test_cross_entropy import sample

pytestmark = pytest.mark.cuda


@contextmanager
def no_sync() -> Iterator[None]:
    """Makes a sync with the host an error in the block."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def captured(
    run: Callable[[], tuple[Tensor, Tensor]],
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    """A graph of ``run``, and the tensors that it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


# --- no sync --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(512, 10), (4096, 10), (64, 50_257)])
def test_cross_entropy_does_not_sync(shape: tuple[int, int]) -> None:
    logits, targets = sample(*shape, on=GPU())
    logits.requires_grad_()
    accumulators = Accumulators(1, device="cuda")
    with no_sync():
        result = cross_entropy(logits, targets)
        result.loss.backward()
        accumulate_(accumulators, 0, result.stats)


def test_grad_stats_and_sgd_do_not_sync() -> None:
    params = [nn.Parameter(torch.ones(size, device="cuda")) for size in (10, 100_000)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    with no_sync():
        stats = grad_stats([[p.grad for p in params]])
        step_all([optimizer], stats.clip_coef)


def test_adamw_does_not_sync() -> None:
    params = [nn.Parameter(torch.ones(size, device="cuda")) for size in (10, 100_000)]
    optimizers = [AdamW([p], torch.tensor(0.1, device="cuda")) for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    with no_sync():
        stats = grad_stats([[p.grad] for p in params])
        step_all(optimizers, stats.clip_coef)
        step_all(optimizers)


def test_norm_relu_pool_does_not_sync() -> None:
    module = NormReluPool(16, pool=True).cuda()
    x = case((16, 16, 8, 8), torch.float32, device="cuda").x.requires_grad_()
    with no_sync():
        module(x).sum().backward()


def test_staging_does_not_sync() -> None:
    images = torch.zeros(50, 32, 32, 3, dtype=torch.uint8, device="cuda")
    table = normalisation_table([0.5] * 3, [0.25] * 3, device="cuda")
    indices = torch.arange(50, device="cuda")
    with no_sync():
        stage_images(images, indices, table, padding=4, flip=True)


# --- memory and streams ---------------------------------------------------------------------------------------------


def test_grad_stats_with_out_allocates_nothing() -> None:
    groups = [[torch.ones(100_000, device="cuda"), torch.ones(10, device="cuda")]]
    out = grad_stats(groups)
    grad_stats(groups, out=out)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    grad_stats(groups)
    counted = torch.cuda.memory_stats()["allocation.all.allocated"]
    grad_stats(groups, out=out)
    assert counted > before  # the count does see allocations
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == counted


def test_grad_stats_runs_on_the_current_stream() -> None:
    g = torch.zeros(4_000_000, device="cuda")
    out = grad_stats([[g]])
    grad_stats([[g]], out=out)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(
            50_000_000
        )  # on another stream the kernel would not wait for this and see zeros
        g.fill_(2.0)
        grad_stats([[g]], out=out)
    stream.synchronize()
    assert out.norm.item() == 4000


def test_norm_relu_pool_runs_on_the_current_stream() -> None:
    x = torch.zeros(64, 8, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    ones = torch.ones(8, device="cuda")
    norm_relu_pool(x, ones, ones)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(
            50_000_000
        )  # on another stream the kernel would not wait for this and see zeros
        x.fill_(3.0)
        _, statistics, _ = norm_relu_pool(x, ones, ones)
    stream.synchronize()
    assert statistics[0].tolist() == [3.0] * 8


# --- graphs that own the memory of what they make -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(512, 10), (4096, 10), (40, 3000)])
def test_a_captured_cross_entropy_can_be_replayed_on_new_values(
    shape: tuple[int, int],
) -> None:
    logits, targets = sample(*shape, on=GPU())
    logits.requires_grad_()
    accumulators = Accumulators(1, 1, shape[0], device="cuda")
    ones = torch.ones((), device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        result = cross_entropy(logits, targets)
        (gradient,) = torch.autograd.grad(result.loss, logits, ones)
        accumulate_(accumulators, 0, result.stats)
        cross_entropy_into(logits, targets, accumulators, 0, first=0)
        return result.stats, gradient

    graph, (stats, gradient) = captured(step)
    for replay in range(1, 4):
        values, new_targets = sample(*shape, seed=replay, on=GPU())
        with torch.no_grad():
            logits.copy_(values)
        targets.copy_(new_targets)
        accumulators.block.zero_()
        graph.replay()
        expected = cross_entropy(logits, targets)
        (expected_gradient,) = torch.autograd.grad(expected.loss, logits, ones)
        assert torch.equal(stats, expected.stats)
        assert torch.equal(gradient, expected_gradient)
        assert torch.equal(accumulators.block[0, 0], 2 * expected.stats)
        assert torch.equal(accumulators.correct[0, 0], expected.correct)


def test_a_captured_norm_relu_pool_can_be_replayed_on_new_values() -> None:
    module = NormReluPool(8, pool=True).cuda()
    x = case((32, 8, 16, 16), torch.bfloat16, device="cuda").x.requires_grad_()
    gradient = torch.ones(32, 8, 8, 8, dtype=torch.bfloat16, device="cuda").to(
        memory_format=torch.channels_last
    )

    def step() -> tuple[Tensor, Tensor]:
        output = module(x)
        (gradient_x,) = torch.autograd.grad(output, x, gradient)
        return output, gradient_x

    graph, (output, gradient_x) = captured(step)
    for seed in range(3):
        with torch.no_grad():
            x.copy_(case((32, 8, 16, 16), torch.bfloat16, seed=seed, device="cuda").x)
        before = module.num_batches_tracked.item()
        graph.replay()
        assert module.num_batches_tracked.item() == before + 1
        expected, expected_x = step()
        assert torch.equal(output, expected)
        assert torch.equal(gradient_x, expected_x)


# --- shapes that take long in the emulator ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(64, 8, 32, 32), (3, 256, 33, 31), (2, 1000, 3, 4), (70_000, 3, 2, 3)]
)
def test_norm_relu_pool_of_large_shapes(
    shape: tuple[int, int, int, int], dtype: torch.dtype, pool: bool, batch: bool
) -> None:
    assert_equals_twin(case(shape, dtype, batch, device="cuda"), pool)
    if pool:
        c = case(shape, dtype, batch, seed=3, device="cuda")
        assert_same_bits(
            by_operator(c, pool=True), by_operator(c, pool=False, pool_outside=True)
        )


@pytest.mark.parametrize("rows", [300, 1000])
@pytest.mark.parametrize("classes", [4096, 4097, 9000])
def test_cross_entropy_of_many_rows_and_classes(classes: int, rows: int) -> None:
    assert_equals_cross_entropy_twin(*sample(rows, classes, on=GPU()))
    assert_equals_cross_entropy_twin(
        *sample(rows, classes, dtype=torch.bfloat16, on=GPU()), label_smoothing=0.1
    )


# --- several devices ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_grad_stats_runs_on_the_gradients_device() -> None:
    stats = grad_stats([[torch.ones(4, device="cuda:1")]])
    assert stats.fields.device == torch.device("cuda:1")
    assert stats.norm.item() == 2


def test_cross_entropy_refuses_tensors_on_two_devices() -> None:
    logits, targets = sample(8, 10, on=GPU())
    with pytest.raises(
        RuntimeError, match="logits and targets are on different devices"
    ):
        cross_entropy(logits, targets.cpu())
    with pytest.raises(RuntimeError, match="block is on another device"):
        cross_entropy_into(logits, targets, Accumulators(1), 0)
