"""`cross_entropy`: equal to its twin in value and gradient, and the same bits every time.

Tests that take ``device`` run on the CPU here; tests/cuda runs them with the CUDA kernels, too.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.ops.accumulators import Accumulators, accumulate_
from esper.ops.cross_entropy import cross_entropy, cross_entropy_into
from tests.cuda.cases import with_sanitizer
from tests.emulation.device import KernelDevice
from tests.ops.cross_entropy_twin import cross_entropy_twin, difficult_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LOSS_TOLERANCE = {torch.float64: {"rtol": 1e-11, "atol": 1e-11}}
FLOAT32_LOSS = {"rtol": 5e-6, "atol": 5e-6}
# Gradients are rounded to the dtype of the logits.
GRADIENT_TOLERANCE = {
    torch.float64: {"rtol": 3e-11, "atol": 3e-13},
    torch.float32: {"rtol": 3e-5, "atol": 3e-7},
    torch.bfloat16: {"rtol": 3 * 2**-8, "atol": 3e-7},
    torch.float16: {"rtol": 3 * 2**-10, "atol": 3e-7},
}
SIZES = [
    *((1, 1), (2, 31), (10, 300), (16, 17), (31, 15), (32, 16), (33, 70), (64, 31)),
    *((65, 300), (256, 31), (257, 300), (1000, 17), (1023, 7), (1025, 70)),
    *((4096, 7), (4097, 7), (9000, 1)),
]
"""Classes and rows, around the tiles and blocks of the kernels."""
SANITIZED_SIZES = (
    (torch.float32, 1, 1),
    (torch.float64, 10, 300),
    (torch.bfloat16, 65, 300),
    (torch.float16, 257, 300),
    (torch.float32, 4097, 7),
)


def sizes_and_dtypes() -> list[tuple[torch.dtype, int, int]]:
    """Each size with two of the types."""
    cases = list(SANITIZED_SIZES)
    for place, (classes, rows) in enumerate(SIZES):
        cases.append((DTYPES[place % 4], classes, rows))
        cases.append((DTYPES[(place // 4 + place + 1) % 4], classes, rows))
    return list(dict.fromkeys(cases))


def sample(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    on: KernelDevice | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits of this shape and targets: a third of them right, a quarter ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    targets.view(-1)[::3] = logits.argmax(dim=-1).view(-1)[::3]
    targets.view(-1)[2::4] = -100
    place = on.torch if on else torch.device("cpu")
    return logits.to(place), targets.to(place)


def assert_equals_twin(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> None:
    own = logits.detach().clone().requires_grad_()
    other = logits.detach().cpu().double().requires_grad_()
    options = ignore_index, label_smoothing
    result = cross_entropy(own, targets, *options)
    loss, correct, stats = cross_entropy_twin(other, targets.cpu(), *options)
    whole = torch.float64 if logits.dtype == torch.float64 else torch.float32
    assert result.loss.dtype == whole
    tolerance = LOSS_TOLERANCE.get(logits.dtype, FLOAT32_LOSS)
    for mine, twin in ((result.loss, loss), (result.stats, stats)):
        mine = mine.detach().double().cpu()
        torch.testing.assert_close(mine, twin.detach(), equal_nan=True, **tolerance)
    assert torch.equal(result.stats[1:].cpu(), stats[1:])  # counts are exact
    assert torch.equal(result.correct.cpu(), correct)
    (3 * result.loss).backward()
    (3 * loss).backward()
    assert own.grad is not None
    assert own.grad.dtype == logits.dtype
    gradient = own.grad.double().cpu()
    tolerance = GRADIENT_TOLERANCE[logits.dtype]
    torch.testing.assert_close(gradient, other.grad, equal_nan=True, **tolerance)


def test_known_numbers() -> None:
    # Row 0: p = (1/4, 3/4), target 1: loss -log(3/4) = log 4/3. Row 1: p = (1/2, 1/2), target 1: loss log 2, and the
    # tie goes to class 0. Row 2 is ignored. Gradients: (p - onehot) / 2.
    logits = torch.tensor([[1.0, 3.0], [5.0, 5.0], [1.0, 9.0]]).log().requires_grad_()
    result = cross_entropy(logits, torch.tensor([1, 1, -100]))
    result.loss.backward()
    total = math.log(4 / 3) + math.log(2)
    assert result.loss.item() == pytest.approx(total / 2, abs=1e-6)
    assert result.correct.tolist() == [1, 0, 0]
    assert result.stats.tolist() == pytest.approx([total, 1, 2, 1, 0], abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx(
        [0.125, -0.125, 0.25, -0.25, 0, 0], abs=1e-7
    )


@pytest.mark.parametrize(
    ("dtype", "classes", "rows"), with_sanitizer(sizes_and_dtypes(), SANITIZED_SIZES)
)
def test_sizes_around_tiles_and_blocks(
    device: KernelDevice, dtype: torch.dtype, classes: int, rows: int
) -> None:
    case = sample(rows, classes, dtype=dtype, seed=rows, on=device)
    assert_equals_twin(*case)
    assert_equals_twin(*case, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("shape", "dtype", "label_smoothing"),
    [
        ((40, 10), torch.float32, 0.9),
        ((6, 200), torch.bfloat16, 1.0),
        ((3, 5, 65), torch.float64, 0.9),
        ((2, 4, 10), torch.float16, 0.9),
        ((1, 2, 1500), torch.float32, 1.0),
        ((2, 3, 50_257), torch.bfloat16, 0.1),
    ],
)
def test_label_smoothing(
    shape: tuple[int, ...], dtype: torch.dtype, label_smoothing: float
) -> None:
    logits, targets = sample(*shape, dtype=dtype)
    assert_equals_twin(logits, targets)
    assert_equals_twin(logits, targets, label_smoothing=label_smoothing)


@pytest.mark.parametrize(
    ("dtype", "classes", "label_smoothing"),
    [
        (torch.float32, 3, 0.0),
        (torch.bfloat16, 10, 0.1),
        (torch.float16, 33, 0.0),
        (torch.float64, 100, 0.1),
        (torch.bfloat16, 2500, 0.0),
        (torch.float32, 5000, 0.1),
    ],
)
def test_extremes_ties_and_non_finite_values(
    device: KernelDevice, dtype: torch.dtype, classes: int, label_smoothing: float
) -> None:
    rows = difficult_rows(classes).to(device.torch, dtype)
    for target in (0, classes // 2, classes - 1):
        targets = torch.full((len(rows),), target, device=device.torch)
        for row in rows:
            assert_equals_twin(row[None], targets[:1], label_smoothing=label_smoothing)
        assert_equals_twin(rows, targets, label_smoothing=label_smoothing)


def test_every_position_of_nan_and_tie_is_judged_as_argmax_does() -> None:
    nan = float("nan")
    values = torch.cartesian_prod(*[torch.tensor([0.0, 1.0, nan])] * 4)  # [81, 4]
    for dtype in DTYPES:
        for target in range(4):
            targets = torch.full((len(values),), target)
            for padding in (0, 40):  # the two paths of the CPU kernel
                logits = torch.cat(
                    [values, torch.full((len(values), padding), -5.0)], dim=1
                ).to(dtype)
                expected = (logits.argmax(dim=1) == targets).to(torch.uint8)
                assert torch.equal(cross_entropy(logits, targets).correct, expected)


def test_an_ignored_row_has_no_gradient() -> None:
    logits = torch.randn(3, 40)
    logits[1] = float("nan")
    logits.requires_grad_()
    cross_entropy(logits, torch.tensor([3, -100, 4])).loss.backward()
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0.0] * 40
    assert logits.grad.isfinite().all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", [(0, 10), (0, 4, 10), (4, 0, 10)])
def test_empty_batches(device: KernelDevice, shape: tuple[int, ...]) -> None:
    logits = torch.zeros(shape, device=device.torch, requires_grad=True)
    targets = torch.zeros(shape[:-1], dtype=torch.int64, device=device.torch)
    result = cross_entropy(logits, targets)
    assert result.loss.isnan()
    assert result.correct.shape == shape[:-1]
    assert result.stats.tolist() == [0, 0, 0, 1, 0]
    result.loss.backward()
    assert logits.grad is not None
    assert logits.grad.shape == shape


@pytest.mark.parametrize("classes", [10, 100])
def test_all_ignored(classes: int) -> None:
    logits = torch.randn(5, classes, requires_grad=True)
    result = cross_entropy(logits, torch.full((5,), -100))
    assert result.loss.isnan()  # as in F.cross_entropy
    assert result.stats.tolist() == [0, 0, 0, 1, 0]
    result.loss.backward()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_ignore_index_may_be_a_class() -> None:
    logits, _ = sample(20, 5)
    targets = torch.arange(20) % 5
    assert_equals_twin(logits, targets, ignore_index=2)
    assert cross_entropy(logits, targets, ignore_index=2).stats[2] == 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_storage_of_every_kind(dtype: torch.dtype) -> None:
    base, targets = sample(12, 20, dtype=dtype)
    assert_equals_twin(base.t().contiguous().t(), targets)
    assert_equals_twin(base[:, ::2], targets.clamp(max=9))
    assert_equals_twin(base[3:, 1:], targets[3:].clamp(max=18))
    assert_equals_twin(base[:1].expand(12, 20), targets)
    assert_equals_twin(base, torch.stack([targets, targets], dim=1)[:, 0])


@pytest.mark.parametrize("operator", [cross_entropy, torch.ops.esper.cross_entropy])
def test_gradcheck(device: KernelDevice, operator: Callable[..., Any]) -> None:
    for shape, label_smoothing in (((5, 4), 0.0), ((2, 3, 7), 0.2)):
        logits, targets = sample(*shape, dtype=torch.float64, on=device)
        arguments = (logits.requires_grad_(), targets, -100, label_smoothing)
        assert torch.autograd.gradcheck(lambda *given: operator(*given)[0], arguments)


def test_a_graph_may_be_walked_twice_but_not_differentiated_twice() -> None:
    logits, targets = sample(8, 10)
    logits.requires_grad_()
    loss = cross_entropy(logits, targets).loss
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits, create_graph=True)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(second.square().sum(), logits)


def test_only_the_loss_is_differentiable() -> None:
    logits, targets = sample(8, 10)
    logits.requires_grad_()
    for result in (
        cross_entropy(logits, targets),
        torch.ops.esper.cross_entropy(logits, targets, -100, 0.0),
    ):
        assert [part.requires_grad for part in result[:3]] == [True, False, False]
    with torch.no_grad():
        assert not cross_entropy(logits, targets).loss.requires_grad
    logits.detach_()
    assert not cross_entropy(logits, targets).loss.requires_grad


def test_nothing_of_the_logits_size_is_kept_for_backward() -> None:
    logits, targets = sample(2, 4, 50_257)
    logits.requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in (logits.data_ptr(), targets.data_ptr()):
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = cross_entropy(logits, targets).loss
    assert sorted(tensor.nbytes for tensor in kept) == [
        5 * 8,
        targets.numel() * 2 * 4,
    ]  # statistics, normaliser
    loss.backward()
    assert logits.grad is not None


def test_logits_changed_before_backward_are_noticed() -> None:
    base, targets = sample(8, 10)
    logits = base.requires_grad_() * 1
    loss = cross_entropy(logits, targets).loss
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_logits_equal_the_twin(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    rows, classes = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 70)))
    values = st.floats(-1000, 1000, width=32) | st.sampled_from(
        [float("inf"), float("-inf"), float("nan")]
    )
    items = data.draw(
        st.lists(values, min_size=rows * classes, max_size=rows * classes)
    )
    targets = data.draw(
        st.lists(
            st.integers(0, classes - 1) | st.just(-100), min_size=rows, max_size=rows
        )
    )
    logits = torch.tensor(items, dtype=torch.float32).view(rows, classes).to(dtype)
    _, correct, stats = cross_entropy_twin(logits, torch.tensor(targets))
    result = cross_entropy(logits, torch.tensor(targets))
    assert torch.equal(result.correct, correct)
    tolerance = LOSS_TOLERANCE.get(dtype, {"rtol": 2e-6, "atol": 1e-4})
    torch.testing.assert_close(result.stats, stats, equal_nan=True, **tolerance)


# --- determinism --------------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(70_001, 10), (301, 2000), (3, 100, 5000)])
def test_same_bits_for_any_number_of_threads(shape: tuple[int, ...]) -> None:
    logits, targets = sample(*shape)

    def run() -> tuple[Tensor, ...]:
        x = logits.clone().requires_grad_()
        result = cross_entropy(x, targets)
        result.loss.backward()
        assert x.grad is not None
        return (*result, x.grad)

    torch.set_num_threads(1)
    alone = run()
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(alone, run(), strict=True))


# --- wrong arguments ----------------------------------------------------------------------------------------------


LOGITS = torch.zeros(2, 3)
TARGETS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "targets", "options", "message"),
    [
        (LOGITS.long(), TARGETS, {}, "logits must be float32, bfloat16, float16 or"),
        (LOGITS, TARGETS.float(), {}, "targets must be int64"),
        (LOGITS[0], TARGETS, {}, r"logits must be \[B, C\] or \[B, T, V\], got \[3\]"),
        (LOGITS, TARGETS[:1], {}, r"targets \[1\] do not fit logits \[2, 3\]"),
        (LOGITS[:, :0], TARGETS, {}, "must have 1 to 2147483647 classes, got 0"),
        (LOGITS, TARGETS + 3, {}, r"target 3 at position 0 is outside 0\.\.2"),
        (LOGITS, TARGETS - 1, {}, r"target -1 at position 0 is outside 0\.\.2"),
        (LOGITS, TARGETS, {"label_smoothing": 1.5}, r"must be in \[0, 1\]"),
    ],
)
def test_wrong_arguments(
    logits: Tensor, targets: Tensor, options: dict[str, float], message: str
) -> None:
    accumulators = Accumulators(1)
    with pytest.raises(RuntimeError, match=f"^cross_entropy: .*{message}"):
        cross_entropy(logits, targets, **options)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=f"^cross_entropy: .*{message}"):
        cross_entropy_into(logits, targets, accumulators, 0, **options)  # type: ignore[arg-type]
    assert not accumulators.block.any()


# --- what torch asks of an operator -------------------------------------------------------------------------------


def test_wrong_accumulated_stats_are_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"stats must be the contiguous float64 \[5\]"
    ):
        accumulate_(Accumulators(1), 0, torch.zeros(4, dtype=torch.float64))
