"""Cross-entropy with its bookkeeping in one pass: loss, correctness per sample, and a row of statistics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.ops import _native
from esper.ops._native import Once
from esper.ops.accumulators import ACCUMULATOR_FIELDS, Accumulators

# Called only when autograd has nothing to record: inside forward and backward, and for measurements.
_native.not_differentiable("cross_entropy_forward", "cross_entropy_backward")
_native.not_differentiable("cross_entropy_into", in_place=True)

_TWICE = (
    "esper's cross_entropy can be differentiated once; for second derivatives use torch.nn.functional.cross_entropy"
)
_functional = torch.ops.esper.cross_entropy.default
_forward = torch.ops.esper.cross_entropy_forward.default
_gradient = torch.ops.esper.cross_entropy_backward.default
_into = _native.writing(torch.ops.esper.cross_entropy_into.default)


class CrossEntropy(NamedTuple):
    """Result of :func:`cross_entropy`, on the logits' device."""

    loss: Tensor
    """Mean over the counted targets, ``[]``, float32 (float64 for float64 logits); differentiable."""
    correct: Tensor
    """1 if the target has the largest logit, 0 if not or if it is ignored; uint8, in the shape of the targets."""
    stats: Tensor
    """Statistics named by ``ACCUMULATOR_FIELDS``, float64 ``[5]``, for :func:`~esper.ops.accumulators.accumulate_`."""


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> CrossEntropy:
    """Computes the mean cross-entropy of ``logits``, their correctness, and the statistics of the call.

    With p = softmax(logits) and C classes, the loss of a sample with target t is that of
    ``torch.nn.functional.cross_entropy``: ``(1 - label_smoothing) * -log p_t + label_smoothing * mean_c(-log p_c)``
    (label smoothing: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7). 16-bit logits are
    computed in float32. A sample is correct if ``argmax`` returns its target: the first of equal maxima, with NaN above
    all numbers.

    The loss is the mean over the targets that are not ``ignore_index``, or NaN without such targets. A sample whose
    logits have no softmax (a NaN, +inf, or only -inf) has a NaN loss, a sample whose target has the logit -inf an
    infinite loss; both count as ``not_finite`` and are included in the mean and the sum.

    Backward computes ``(p - target distribution) / count`` from the saved logits and two numbers per sample, so that no
    other tensor of the logits' size is saved. The logits must not be changed in place before backward. The loss can be
    differentiated once.

    Args:
        logits: ``[B, C]``, or ``[B, T, V]`` for language; float32, bfloat16, float16 or float64, any strides (a view
            that is not contiguous is copied).
        targets: int64 ``[B]`` or ``[B, T]``, on the same device.
        ignore_index: target that is not counted.
        label_smoothing: weight of the uniform distribution, 0 to 1.

    Raises:
        RuntimeError: other shapes or dtypes, two devices, ``label_smoothing`` outside [0, 1]; on the CPU also a target
            outside 0..C-1. Checking that on CUDA would need a sync: there the sample's loss and gradient are NaN.
        NotImplementedError: forward-mode derivatives.
    """
    _native.refuse_forward_mode("esper::cross_entropy")
    if torch.compiler.is_compiling():
        loss, correct, stats, _ = _functional(logits, targets, ignore_index, label_smoothing)
    elif logits.requires_grad and torch.is_grad_enabled():
        # Equivalent to the operator's own autograd, whose Python overhead in torch is twice the time of the kernels.
        loss, correct, stats = _Eager.apply(logits, targets, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    else:
        loss, correct, stats, _ = _forward(logits, targets, ignore_index, label_smoothing)
    return CrossEntropy(loss, correct, stats)


def cross_entropy_gradient(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns the loss of :func:`cross_entropy`, and its gradient in the shape of ``logits``, without autograd."""
    loss, _, stats, normaliser = _forward(logits, targets, ignore_index, label_smoothing)
    one = loss.new_ones(())
    return loss, _gradient(one, logits, targets, normaliser, stats, ignore_index, label_smoothing)


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
    """Measures without a gradient and without a sync, directly into a row of the accumulators.

    Adds the ``stats`` that :func:`cross_entropy` would return to ``accumulators.block[env, configuration]`` and,
    with ``first``, overwrites ``accumulators.correct[env, configuration, first : first + B]``: one byte per sample for
    logits ``[B, C]``; the number of correct tokens of each sequence for ``[B, T, V]``.

    Args:
        logits, targets, ignore_index, label_smoothing: as for :func:`cross_entropy`.
        accumulators: the accumulators to update, on the same device; made with ``dtype=torch.int16`` for ``[B, T, V]``.
        env: first index of the row.
        configuration: second index of the row.
        first: index of the first sample in the row of ``correct``; None writes no samples.

    Raises:
        RuntimeError: as for :func:`cross_entropy`, and if the row or the samples are outside the accumulators, or the
            accumulators are not made for these logits. Invalid arguments leave the accumulators unchanged.
    """
    correct = None
    if first is not None:
        correct = accumulators.correct
    _into(
        logits,
        targets,
        accumulators.block,
        correct,
        env,
        configuration,
        first or 0,
        ignore_index,
        label_smoothing,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    logits, targets, ignore_index, label_smoothing = inputs
    ctx.ignore_index = ignore_index
    ctx.label_smoothing = label_smoothing
    _, correct, stats, normaliser = output
    ctx.mark_non_differentiable(correct, stats, normaliser)
    ctx.save_for_backward(logits, targets, normaliser, stats)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: object) -> tuple[Tensor | None, None, None, None]:
    if grad_loss is None:
        return None, None, None, None
    logits, targets, normaliser, stats = ctx.saved_tensors
    gradient = _gradient(
        grad_loss,
        logits,
        targets,
        normaliser,
        stats,
        ctx.ignore_index,
        ctx.label_smoothing,
    )
    if torch.is_grad_enabled():  # create_graph=True
        gradient = Once.apply(_TWICE, gradient, grad_loss, logits)  # type: ignore[no-untyped-call]
    return gradient, None, None, None


class _Eager(torch.autograd.Function):
    """The forward and backward kernels as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        loss, correct, stats, _ = output
        return loss, correct, stats

    backward = staticmethod(_backward)


torch.library.register_autograd("esper::cross_entropy", _backward, setup_context=_save)


@torch.library.register_fake("esper::cross_entropy_forward")  # type: ignore[untyped-decorator]
@torch.library.register_fake("esper::cross_entropy")  # type: ignore[untyped-decorator]
def _fake(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    real = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return (
        logits.new_empty((), dtype=real),
        logits.new_empty(targets.shape, dtype=torch.uint8),
        logits.new_empty((len(ACCUMULATOR_FIELDS),), dtype=torch.float64),
        logits.new_empty((targets.numel(), 2), dtype=real),
    )


@torch.library.register_fake("esper::cross_entropy_backward")  # type: ignore[untyped-decorator]
def _fake_backward(grad_loss: Tensor, logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)
