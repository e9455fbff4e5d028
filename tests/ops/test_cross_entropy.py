"""`cross_entropy` on the CPU: equal to its twin in value and gradient, and the same bits every time."""

import math
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.ops.accumulators import Accumulators, accumulate_
from esper.ops.cross_entropy import cross_entropy, cross_entropy_into
from tests.ops.cross_entropy_twin import cross_entropy_twin, difficult_rows
from tests.selection import slow_except

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LOSS_TOLERANCE = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}}
FLOAT32_LOSS = {"rtol": 2e-6, "atol": 2e-6}
# Gradients are rounded to the dtype of the logits.
GRADIENT_TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-14},
    torch.float32: {"rtol": 5e-6, "atol": 1e-7},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-7},
    torch.float16: {"rtol": 2**-10, "atol": 1e-7},
}


def sample(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 3.0
) -> tuple[Tensor, Tensor]:
    """Logits of this shape and targets: a third of them right, a quarter ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    targets.view(-1)[::3] = logits.argmax(dim=-1).view(-1)[::3]
    targets.view(-1)[2::4] = -100
    return logits, targets


def assert_equals_twin(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> None:
    own = logits.detach().clone().requires_grad_()
    other = logits.detach().double().requires_grad_()
    result = cross_entropy(own, targets, ignore_index, label_smoothing)
    loss, correct, stats = cross_entropy_twin(
        other, targets, ignore_index, label_smoothing
    )

    assert result.loss.dtype == (
        torch.float64 if logits.dtype == torch.float64 else torch.float32
    )
    loss_tolerance = LOSS_TOLERANCE.get(logits.dtype, FLOAT32_LOSS)
    torch.testing.assert_close(
        result.loss.double(), loss, equal_nan=True, **loss_tolerance
    )
    torch.testing.assert_close(result.stats, stats, equal_nan=True, **loss_tolerance)
    assert torch.equal(result.stats[1:], stats[1:])  # counts are exact
    assert torch.equal(result.correct, correct)

    (3 * result.loss).backward()
    (3 * loss).backward()
    assert own.grad is not None
    assert other.grad is not None
    assert own.grad.dtype == logits.dtype
    tolerance = {
        name: 3 * value for name, value in GRADIENT_TOLERANCE[logits.dtype].items()
    }
    torch.testing.assert_close(
        own.grad.double(), other.grad, equal_nan=True, **tolerance
    )


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "classes", [1, 2, 10, 16, 31, 32, 33, 64, 100, 1000, 1023, 1024, 1025, 2100]
)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 70])
def test_sizes_around_tiles_and_blocks(
    dtype: torch.dtype, classes: int, rows: int
) -> None:
    logits, targets = sample(rows, classes, dtype=dtype, seed=rows)
    assert_equals_twin(logits, targets)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(40, 10), (6, 200), (3, 5, 65), (2, 4, 10), (1, 2, 1500)]
)
@pytest.mark.parametrize("label_smoothing", [0.1, 0.9, 1.0])
def test_label_smoothing(
    dtype: torch.dtype, shape: tuple[int, ...], label_smoothing: float
) -> None:
    logits, targets = sample(*shape, dtype=dtype)
    assert_equals_twin(logits, targets, label_smoothing=label_smoothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_50257(dtype: torch.dtype) -> None:
    logits, targets = sample(2, 3, 50_257, dtype=dtype)
    assert_equals_twin(logits, targets)
    assert_equals_twin(logits, targets, label_smoothing=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [3, 10, 33, 2500])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_extremes_ties_and_non_finite_values(
    dtype: torch.dtype, classes: int, label_smoothing: float
) -> None:
    rows = difficult_rows(classes).to(dtype)
    for target in (0, classes // 2, classes - 1):
        for row in rows:
            assert_equals_twin(
                row[None], torch.tensor([target]), label_smoothing=label_smoothing
            )
        assert_equals_twin(
            rows, torch.full((len(rows),), target), label_smoothing=label_smoothing
        )


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


def test_not_finite_losses_are_counted() -> None:
    logits = torch.zeros(4, 3)
    logits[1, 0] = float("nan")
    logits[2, 1] = float("-inf")  # the target's: an infinite loss
    stats = cross_entropy(logits, torch.tensor([0, 1, 1, 2])).stats
    assert stats[4] == 2
    assert stats[0].isnan()
    # Ignored, it is no one's business.
    assert (
        cross_entropy(logits, torch.tensor([0, -100, -100, 2])).stats.isfinite().all()
    )


def test_an_ignored_row_has_no_gradient() -> None:
    logits = torch.randn(3, 40)
    logits[1] = float("nan")
    logits.requires_grad_()
    cross_entropy(logits, torch.tensor([3, -100, 4])).loss.backward()
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0.0] * 40
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 10), (0, 4, 10), (4, 0, 10)])
def test_empty_batches(shape: tuple[int, ...]) -> None:
    logits = torch.zeros(shape, requires_grad=True)
    result = cross_entropy(logits, torch.zeros(shape[:-1], dtype=torch.int64))
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


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_gradcheck(label_smoothing: float) -> None:
    operator = torch.ops.esper.cross_entropy
    for shape in ((5, 4), (2, 3, 7)):
        logits, targets = sample(*shape, dtype=torch.float64)
        logits.requires_grad_()
        for function in (cross_entropy, operator):
            arguments = (logits, targets, -100, label_smoothing)
            assert torch.autograd.gradcheck(
                lambda *given, f=function: f(*given)[0], arguments
            )


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


def test_many_threads_at_a_time() -> None:
    cases = [sample(64 + i, 10 + 20 * i, seed=i) for i in range(4)]
    expected = [cross_entropy(*case) for case in cases]
    accumulators = Accumulators(len(cases))
    wrong: list[int] = []

    def repeat(case: int) -> None:
        for _ in range(50):
            result = cross_entropy(*cases[case])
            cross_entropy_into(*cases[case], accumulators, case)
            if not all(
                torch.equal(a, b) for a, b in zip(result, expected[case], strict=True)
            ):
                wrong.append(case)

    threads = [
        threading.Thread(target=repeat, args=(case,)) for case in range(len(cases))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for case, result in enumerate(expected):
        torch.testing.assert_close(accumulators.block[case, 0], 50 * result.stats)


# --- wrong arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "targets", "options", "message"),
    [
        (
            torch.zeros(2, 3).long(),
            torch.zeros(2).long(),
            {},
            "logits must be float32, bfloat16, float16 or float64",
        ),
        (torch.zeros(2, 3), torch.zeros(2), {}, "targets must be int64"),
        (
            torch.zeros(3),
            torch.zeros(3).long(),
            {},
            r"logits must be \[B, C\] or \[B, T, V\], got \[3\]",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(3).long(),
            {},
            r"targets \[3\] do not fit logits \[2, 3\]",
        ),
        (
            torch.zeros(2, 4, 3),
            torch.zeros(2).long(),
            {},
            r"targets \[2\] do not fit logits \[2, 4, 3\]",
        ),
        (
            torch.zeros(2, 0),
            torch.zeros(2).long(),
            {},
            "must have 1 to 2147483647 classes, got 0",
        ),
        (
            torch.zeros(2, 3),
            torch.tensor([0, 3]),
            {},
            r"target 3 at position 1 is outside 0\.\.2",
        ),
        (
            torch.zeros(2, 3),
            torch.tensor([-1, 0]),
            {},
            r"target -1 at position 0 is outside 0\.\.2",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2).long(),
            {"label_smoothing": 1.5},
            r"label_smoothing must be in \[0, 1\]",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2).long(),
            {"label_smoothing": float("nan")},
            "label_smoothing must be in",
        ),
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


@pytest.mark.parametrize(
    "dtype",
    slow_except([torch.float32], [torch.float32, torch.bfloat16, torch.float64]),
)
def test_opcheck(dtype: torch.dtype) -> None:
    for shape in ((6, 5), (2, 3, 40)):
        logits, targets = sample(*shape, dtype=dtype)
        torch.library.opcheck(
            torch.ops.esper.cross_entropy.default, (logits, targets, -100, 0.1)
        )
        logits.requires_grad_()
        torch.library.opcheck(
            torch.ops.esper.cross_entropy.default, (logits, targets, -100, 0.1)
        )
        logits = logits.detach()
        output = torch.ops.esper.cross_entropy_forward(logits, targets, -100, 0.1)
        torch.library.opcheck(
            torch.ops.esper.cross_entropy_forward.default, (logits, targets, -100, 0.1)
        )
        arguments = (
            torch.ones_like(output[0]),
            logits,
            targets,
            output[3],
            output[2],
            -100,
            0.1,
        )
        torch.library.opcheck(torch.ops.esper.cross_entropy_backward.default, arguments)


def test_eager_and_compiled_give_the_same_bits() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(cross_entropy(x, t))

    logits, targets = sample(20, 10)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    eager, traced = cross_entropy(a, targets), compiled(b, targets)
    assert all(torch.equal(x, y) for x, y in zip(eager, traced, strict=True))
    eager.loss.backward()
    traced[0].backward()
    assert a.grad is not None
    assert b.grad is not None
    assert torch.equal(a.grad, b.grad)


def test_under_autocast_the_logits_are_taken_as_they_are() -> None:
    logits, targets = sample(20, 10, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = cross_entropy(logits, targets)
    assert result.loss.dtype == torch.float32
    assert torch.equal(result.loss, cross_entropy(logits, targets).loss)


def test_wrong_accumulated_stats_are_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"stats must be the contiguous float64 \[5\]"
    ):
        accumulate_(Accumulators(1), 0, torch.zeros(4, dtype=torch.float64))
