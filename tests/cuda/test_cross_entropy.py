"""The CUDA kernels of `cross_entropy`, on a GPU or emulated: the tests of the CPU kernels, grids and launches."""

import pytest
import torch

from esper.ops.accumulators import Accumulators, accumulate_
from esper.ops.cross_entropy import cross_entropy, cross_entropy_into
from tests.emulation.device import KernelDevice
from tests.ops.test_cross_entropy import (  # noqa: F401  the tests run with these kernels, too
    assert_equals_twin,
    sample,
    test_empty_batches,
    test_extremes_ties_and_non_finite_values,
    test_gradcheck,
    test_sizes_around_tiles_and_blocks,
)


@pytest.mark.parametrize(
    ("shape", "full"),
    [
        ((1_100, 3), (262_145 + 300, 3)),
        ((40, 65), (8_200, 65)),
        pytest.param((7, 4097), (1_100, 4097), marks=pytest.mark.sanitizer),
        ((3, 20, 65), (3, 700, 65)),
        ((2, 3, 50_257), (2, 3, 50_257)),
    ],
)
def test_blocks_that_take_several_rows(
    device: KernelDevice, shape: tuple[int, ...], full: tuple[int, ...]
) -> None:
    """The forward grid has at most 1024 blocks, of 256 rows up to 64 classes, 8 up to 4096, and 1 above; ``full`` is a
    shape that exceeds it."""
    with device.few_blocks("forward_kernel", 3):
        assert_equals_twin(
            *sample(*(full if device.torch.type == "cuda" else shape), on=device)
        )


@pytest.mark.parametrize(
    ("shape", "full"), [((200, 10), (1_700_000, 10)), ((40, 300), (66_000, 300))]
)
def test_backward_blocks_that_take_several_turns(
    device: KernelDevice, shape: tuple[int, int], full: tuple[int, int]
) -> None:
    """The backward grid has at most 65536 blocks; ``full`` is a shape that exceeds it."""
    with device.few_blocks("backward_kernel", 3):
        assert_equals_twin(
            *sample(*(full if device.torch.type == "cuda" else shape), on=device)
        )


@pytest.mark.parametrize(
    "classes", [10, pytest.param(300, marks=pytest.mark.sanitizer), 5000]
)
def test_a_target_that_is_no_class_is_not_finite(
    device: KernelDevice, classes: int
) -> None:
    logits, targets = sample(4, classes, on=device)
    targets[:] = torch.tensor([0, classes, -1, 1])
    logits.requires_grad_()
    result = cross_entropy(logits, targets)
    assert result.stats[4] == 2
    assert result.loss.isnan()
    result.loss.backward()
    assert logits.grad is not None
    assert logits.grad.isnan().all(dim=1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("shape", [(40, 10), (40, 300), (4000, 10), (30, 50_000)])
def test_into_writes_what_the_functional_form_returns(
    device: KernelDevice, shape: tuple[int, int]
) -> None:
    accumulators = Accumulators(2, 2, shape[0] + 5, device=device.torch)
    case = sample(*shape, on=device)
    result = cross_entropy(*case)
    cross_entropy_into(*case, accumulators, 1, 0, first=3)
    accumulate_(accumulators, 1, result.stats, configuration=1)
    assert torch.equal(accumulators.block[1, 0], result.stats)
    assert torch.equal(accumulators.block[1, 1], result.stats)
    assert torch.equal(accumulators.correct[1, 0, 3 : 3 + shape[0]], result.correct)
    assert accumulators.correct.sum() == result.correct.sum()
    assert not accumulators.block[0].any()


@pytest.mark.parametrize(
    "shape",
    [
        (4, 30, 5),
        (3, 700, 65),
        pytest.param((40, 3, 2000), marks=pytest.mark.sanitizer),
    ],
)
def test_into_counts_the_right_tokens_of_each_sequence(
    device: KernelDevice, shape: tuple[int, int, int]
) -> None:
    accumulators = Accumulators(1, 1, shape[0], dtype=torch.int16, device=device.torch)
    case = sample(*shape, on=device)
    result = cross_entropy(*case)
    cross_entropy_into(*case, accumulators, 0, first=0)
    assert torch.equal(
        accumulators.correct[0, 0].long(), result.correct.long().sum(dim=1)
    )
    assert torch.equal(accumulators.read().block[0, 0], result.stats.cpu())


def test_same_bits_every_time(device: KernelDevice) -> None:
    case = sample(20_000, 10, on=device)
    first = cross_entropy(*case)
    for _ in range(10):
        assert all(
            torch.equal(a, b) for a, b in zip(first, cross_entropy(*case), strict=True)
        )


@pytest.mark.parametrize("shape", [(512, 10), (4096, 10), (128, 100), (64, 50_257)])
def test_at_most_three_kernels(device: KernelDevice, shape: tuple[int, int]) -> None:
    logits, targets = sample(*shape, on=device)
    logits.requires_grad_()
    accumulators = Accumulators(1, device=device.torch)
    ones = torch.ones(
        (), device=device.torch
    )  # or autograd would launch a fill of its own

    def step() -> None:
        result = cross_entropy(logits, targets)
        torch.autograd.grad(result.loss, logits, ones)
        accumulate_(accumulators, 0, result.stats)

    launched = device.launched(step)
    kernels = [name for name in launched if "memset" not in name.lower()]
    assert len(kernels) == 3, launched
    if shape == (512, 10):  # one block, so no scratch memory either
        assert len(launched) == 3
