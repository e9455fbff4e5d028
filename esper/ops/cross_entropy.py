"""Cross-entropy with its bookkeeping in one pass: loss, correctness per sample, and the row of statistics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.ops.accumulators import ACCUMULATOR_FIELDS, Accumulators

# These are called where autograd has nothing to record: inside forward and backward, and to measure only.
_library = torch.library.Library("esper", "IMPL")  # type: ignore[no-untyped-call]
for _name in ("cross_entropy_forward", "cross_entropy_backward", "cross_entropy_into"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]

_functional = torch.ops.esper.cross_entropy.default
_forward = torch.ops.esper.cross_entropy_forward.default
_gradient = torch.ops.esper.cross_entropy_backward.default
_into = torch.ops.esper.cross_entropy_into.default


class CrossEntropy(NamedTuple):
    """What :func:`cross_entropy` returns, all on the logits' device."""

    loss: Tensor
    """``[]``, float32 (float64 for float64 logits): mean over the counted targets; differentiable"""
    correct: Tensor
    """uint8, the shape of the targets: 1 where the target has the largest logit; 0 where it is ignored"""
    stats: Tensor
    """float64 ``[5]``, named by ``ACCUMULATOR_FIELDS``, for :func:`esper.ops.accumulate_`"""


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> CrossEntropy:
    """Mean cross-entropy of ``logits``, which of them are right, and the statistics of the call.

    With p = softmax(logits) and C classes, the loss of a sample with target t is that of
    ``torch.nn.functional.cross_entropy``: ``(1 - label_smoothing) * -log p_t + label_smoothing * mean_c(-log p_c)``
    (label smoothing: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7). Logits of 16 bits are
    computed with in float32. Right is what ``argmax`` would call so: the first of the largest, and NaN above all.

    The loss is the mean over the targets that are not ``ignore_index``, NaN if all are. A sample whose logits have no
    softmax (a NaN, +inf, or nothing above -inf) has a NaN loss, and one whose target has the logit -inf an infinite
    loss; both are counted in ``not_finite`` and go into the mean and the sum as they are.

    Backward computes ``(p - target distribution) / count`` from the logits, which it keeps, and two numbers a sample,
    so nothing of the logits' size is kept beside them. The logits must not be changed in place before. It can be
    differentiated once.

    Args:
        logits: ``[B, C]``, or ``[B, T, V]`` for language; float32, bfloat16, float16 or float64, any strides (a view
            that is not contiguous is copied).
        targets: int64 ``[B]`` or ``[B, T]``, on the same device.
        ignore_index: target that is not counted.
        label_smoothing: weight of the uniform distribution, 0 to 1.

    Raises:
        RuntimeError: other shapes or dtypes, two devices, ``label_smoothing`` outside [0, 1]; on the CPU also a target
            outside 0..C-1. On CUDA that would need a sync: there the sample's loss and gradient are NaN.
    """
    if torch.compiler.is_compiling():
        loss, correct, stats, _ = _functional(logits, targets, ignore_index, label_smoothing)
    elif logits.requires_grad and torch.is_grad_enabled():
        # As the operator's own autograd, which torch runs through more Python: that took twice as long as the kernels.
        loss, correct, stats = _Eager.apply(logits, targets, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    else:
        loss, correct, stats, _ = _forward(logits, targets, ignore_index, label_smoothing)
    return CrossEntropy(loss, correct, stats)


def cross_entropy_into(
    logits: Tensor,
    targets: Tensor,
    accumulators: Accumulators,
    env: int,
    configuration: int = 0,
    first: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> None:
    """Measure without a gradient, straight into a row of the accumulators; nothing is returned and nothing synced.

    Adds to ``accumulators.block[env, configuration]`` what :func:`cross_entropy` would return as ``stats``, and, with
    ``first``, overwrites ``accumulators.correct[env, configuration, first : first + B]``: one byte a sample for logits
    ``[B, C]``; the number of right tokens of each sequence for ``[B, T, V]``.

    Args:
        logits: as for :func:`cross_entropy`; that they require grad makes no difference.
        targets: as there.
        accumulators: where to write, on the same device; made with ``language=True`` for ``[B, T, V]``.
        env: first index of the row.
        configuration: second index of the row.
        first: place of the first sample in the row of ``correct``; None writes no samples.
        ignore_index: as there.
        label_smoothing: as there.

    Raises:
        RuntimeError: as there, and when the row or the samples are outside the accumulators, or the accumulators are of
            the other kind. Wrong arguments leave the accumulators as they were.
    """
    correct = None if first is None else accumulators.correct
    _into(logits, targets, accumulators.block, correct, env, configuration, first or 0, ignore_index, label_smoothing)


# --- autograd -----------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int, float], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    logits, targets, ctx.ignore_index, ctx.label_smoothing = inputs
    _, correct, stats, normaliser = output
    ctx.mark_non_differentiable(correct, stats, normaliser)
    ctx.save_for_backward(logits, targets, normaliser, stats)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: object) -> tuple[Tensor | None, None, None, None]:
    if grad_loss is None:
        return None, None, None, None
    logits, targets, normaliser, stats = ctx.saved_tensors
    gradient = _gradient(grad_loss, logits, targets, normaliser, stats, ctx.ignore_index, ctx.label_smoothing)
    if torch.is_grad_enabled():  # create_graph=True
        gradient = _Once.apply(gradient, grad_loss, logits)  # type: ignore[no-untyped-call]
    return gradient, None, None, None


class _Eager(torch.autograd.Function):
    """The two kernels as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        output = _forward(logits, targets, ignore_index, label_smoothing)
        _save(ctx, (logits, targets, ignore_index, label_smoothing), output)
        return output[0], output[1], output[2]

    backward = staticmethod(_backward)


class _Once(torch.autograd.Function):
    """The gradient again, as a function of what it was made from, so that differentiating it is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, grad_loss: Tensor, logits: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "esper's cross_entropy can be differentiated once; for second derivatives use "
            "torch.nn.functional.cross_entropy"
        )


torch.library.register_autograd("esper::cross_entropy", _backward, setup_context=_save)


@torch.library.register_fake("esper::cross_entropy_forward")  # type: ignore[untyped-decorator]
@torch.library.register_fake("esper::cross_entropy")  # type: ignore[untyped-decorator]
def _fake(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    real = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return (
        logits.new_empty((), dtype=real),
        logits.new_empty(targets.shape, dtype=torch.uint8),
        logits.new_empty((len(ACCUMULATOR_FIELDS),), dtype=torch.float64),
        logits.new_empty((targets.numel(), 2), dtype=real),
    )


@torch.library.register_fake("esper::cross_entropy_backward")  # type: ignore[untyped-decorator]
def _fake_backward(
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("esper::cross_entropy_into")  # type: ignore[untyped-decorator]
def _fake_into(
    logits: Tensor,
    targets: Tensor,
    block: Tensor,
    correct: Tensor | None,
    env: int,
    configuration: int,
    first: int,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    return None
