"""The CUDA kernels of `cross_entropy`: equal to the twin, deterministic, few launches. On a GPU or emulated."""

from itertools import product

import pytest
import torch
from torch import Tensor

from esper.ops.accumulators import Accumulators, accumulate_
from esper.ops.cross_entropy import cross_entropy, cross_entropy_into
from tests.cuda.cases import with_sanitizer
from tests.emulation.device import KernelDevice
from tests.ops.cross_entropy_twin import cross_entropy_twin, difficult_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT32_LOSS = {"rtol": 5e-6, "atol": 5e-6}
LOSS_TOLERANCE = {torch.float64: {"rtol": 1e-11, "atol": 1e-11}}
GRADIENT_TOLERANCE = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-13},
    torch.float32: {"rtol": 1e-5, "atol": 1e-7},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-7},
    torch.float16: {"rtol": 2**-10, "atol": 1e-7},
}


def sample(
    device: KernelDevice, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits of this shape and targets: a third of them right, a quarter ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    targets.view(-1)[::3] = logits.argmax(dim=-1).view(-1)[::3]
    targets.view(-1)[2::4] = -100
    return logits.to(device.torch), targets.to(device.torch)


def assert_equals_twin(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0
) -> None:
    own = logits.detach().clone().requires_grad_()
    other = logits.detach().cpu().double().requires_grad_()
    result = cross_entropy(own, targets, label_smoothing=label_smoothing)
    loss, correct, stats = cross_entropy_twin(
        other, targets.cpu(), label_smoothing=label_smoothing
    )
    tolerance = LOSS_TOLERANCE.get(logits.dtype, FLOAT32_LOSS)
    torch.testing.assert_close(
        result.loss.detach().double().cpu(), loss.detach(), equal_nan=True, **tolerance
    )
    torch.testing.assert_close(result.stats.cpu(), stats, equal_nan=True, **tolerance)
    assert torch.equal(result.stats[1:].cpu(), stats[1:])
    assert torch.equal(result.correct.cpu(), correct)
    (3 * result.loss).backward()
    (3 * loss).backward()
    assert own.grad is not None
    assert other.grad is not None
    gradient = {
        name: 3 * value for name, value in GRADIENT_TOLERANCE[logits.dtype].items()
    }
    torch.testing.assert_close(
        own.grad.double().cpu(), other.grad, equal_nan=True, **gradient
    )


SIZES = (
    *product(DTYPES, [1, 2, 10, 64, 65, 256, 257, 1000], [1, 31, 300]),
    *product(DTYPES, [4096, 4097, 9000], [1, 7]),
)
SANITIZED_SIZES = (
    (torch.float32, 1, 1),
    (torch.float64, 10, 300),
    (torch.bfloat16, 65, 31),
    (torch.float16, 257, 300),
    (torch.float32, 4097, 7),
)


@pytest.mark.parametrize(
    ("dtype", "classes", "rows"), with_sanitizer(SIZES, SANITIZED_SIZES)
)
def test_sizes_around_warps_and_blocks(
    device: KernelDevice, dtype: torch.dtype, classes: int, rows: int
) -> None:
    assert_equals_twin(*sample(device, rows, classes, dtype=dtype, seed=rows))
    assert_equals_twin(
        *sample(device, rows, classes, dtype=dtype, seed=rows), label_smoothing=0.1
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
            *sample(device, *(full if device.torch.type == "cuda" else shape))
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
            *sample(device, *(full if device.torch.type == "cuda" else shape))
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [3, 10, 100, 5000])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_extremes_ties_and_what_is_not_finite(
    device: KernelDevice, dtype: torch.dtype, classes: int, label_smoothing: float
) -> None:
    rows = difficult_rows(classes).to(device.torch, dtype)
    for target in (0, classes // 2, classes - 1):
        for row in rows:
            assert_equals_twin(
                row[None], torch.tensor([target], device=device.torch), label_smoothing
            )


@pytest.mark.parametrize(
    "shape",
    [pytest.param((0, 10), marks=pytest.mark.sanitizer), (0, 4, 10), (4, 0, 10)],
)
def test_empty_batches(device: KernelDevice, shape: tuple[int, ...]) -> None:
    logits = torch.zeros(shape, device=device.torch, requires_grad=True)
    result = cross_entropy(
        logits, torch.zeros(shape[:-1], dtype=torch.int64, device=device.torch)
    )
    assert result.loss.isnan()
    assert result.stats.tolist() == [0, 0, 0, 1, 0]
    result.loss.backward()
    assert logits.grad is not None
    assert logits.grad.shape == shape


@pytest.mark.parametrize(
    "classes", [10, pytest.param(300, marks=pytest.mark.sanitizer), 5000]
)
def test_a_target_that_is_no_class_is_not_finite(
    device: KernelDevice, classes: int
) -> None:
    logits, targets = sample(device, 4, classes)
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
    case = sample(device, *shape)
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
    case = sample(device, *shape)
    result = cross_entropy(*case)
    cross_entropy_into(*case, accumulators, 0, first=0)
    assert torch.equal(
        accumulators.correct[0, 0].long(), result.correct.long().sum(dim=1)
    )
    assert torch.equal(accumulators.read().block[0, 0], result.stats.cpu())


def test_same_bits_every_time(device: KernelDevice) -> None:
    case = sample(device, 20_000, 10)
    first = cross_entropy(*case)
    for _ in range(10):
        assert all(
            torch.equal(a, b) for a, b in zip(first, cross_entropy(*case), strict=True)
        )


@pytest.mark.parametrize("shape", [(512, 10), (4096, 10), (128, 100), (64, 50_257)])
def test_at_most_three_kernels(device: KernelDevice, shape: tuple[int, int]) -> None:
    logits, targets = sample(device, *shape)
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


def test_gradcheck_and_opcheck(device: KernelDevice) -> None:
    logits, targets = sample(device, 5, 4, dtype=torch.float64)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets).loss, (logits,))
    torch.library.opcheck(
        torch.ops.esper.cross_entropy.default, (logits, targets, -100, 0.1)
    )
