"""BatchNorm2d, ReLU and an optional 2x2 max-pool as one operator, with two passes over the input each way.

The operator is functional; from the statistics that it returns, a second one updates the running statistics.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from esper.ops import _native
from esper.ops._native import Once

# Rows of `statistics`, float32 [3, C], in the order of csrc/norm_relu_pool.h: the mean and 1 / sqrt(biased variance +
# eps) used for normalisation, and the unbiased variance.
STATISTICS = ("mean", "inv_std", "variance")

_DTYPES = (torch.float32, torch.bfloat16)

# Called only when autograd has nothing to record: inside forward and backward.
_native.not_differentiable("norm_relu_pool_forward", "norm_relu_pool_backward")
_native.not_differentiable("norm_relu_pool_update_", in_place=True)

_TWICE = "norm_relu_pool can be differentiated once; use the three modules for higher derivatives"
_functional = torch.ops.esper.norm_relu_pool.default
_forward = torch.ops.esper.norm_relu_pool_forward.default
_backward = torch.ops.esper.norm_relu_pool_backward.default
_update = _native.writing(torch.ops.esper.norm_relu_pool_update_.default)


def norm_relu_pool(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    eps: float = 1e-5,
    pool: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """``max_pool2d(relu(batch_norm(input)), 2)``, or without the pool.

    Partial sums are float32 and are combined in float64. Forward and backward are bit-identical with the pool inside or
    as a separate ``max_pool2d``, and for any number of threads.

    Args:
        input: ``[N, C, H, W]``, contiguous in channels_last, float32 or bfloat16. Differentiable once.
        weight: float32 ``[C]``; differentiable.
        bias: float32 ``[C]``; differentiable.
        running_mean: float32 ``[C]`` to normalise with; None: the statistics of this batch.
        running_var: as ``running_mean``.
        eps: added to the variance.
        pool: whether to pool; an odd last row or column is dropped, as in ``max_pool2d``.

    Returns:
        output ``[N, C, H, W]`` or ``[N, C, H // 2, W // 2]`` of the input's dtype and layout; statistics, float32
        ``[3, C]``, rows named by ``STATISTICS`` (0 for an empty input); choice, uint8 in the shape of the output: the
        position of the maximum in its window, or 4 if ReLU made it zero (``[0]`` without the pool).

    Raises:
        RuntimeError: another layout, dtype, shape or device; batch statistics of a single value per channel.
        NotImplementedError: forward-mode derivatives.
    """
    _native.refuse_forward_mode("esper::norm_relu_pool")
    run: Callable[..., Any] = _forward
    if torch.compiler.is_compiling():
        run = _functional
    elif torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad or bias.requires_grad):
        # Equivalent to the operator's own autograd, whose Python overhead in torch is as long as small kernels.
        run = _Eager.apply
    return run(input, weight, bias, running_mean, running_var, float(eps), pool)  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    input, weight, bias, running_mean, _, _, ctx.pool = inputs
    _, statistics, choice = output
    ctx.batch_statistics = running_mean is None
    ctx.save_for_backward(input, weight, bias, statistics, choice)
    ctx.mark_non_differentiable(statistics, choice)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 7
    input, weight, bias, statistics, choice = ctx.saved_tensors
    gradient = grad_output.contiguous(memory_format=torch.channels_last)
    gradients = _backward(
        gradient,
        input,
        weight,
        bias,
        statistics,
        choice,
        ctx.batch_statistics,
        ctx.pool,
    )
    if torch.is_grad_enabled():  # create_graph=True
        inputs = grad_output, input, weight
        gradients = [Once.apply(_TWICE, g, *inputs) for g in gradients]  # type: ignore[no-untyped-call]
    return (*gradients, None, None, None, None)


class _Eager(torch.autograd.Function):
    """The forward and backward kernels as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output: tuple[Tensor, Tensor, Tensor] = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


torch.library.register_autograd("esper::norm_relu_pool", _gradients, setup_context=_setup_context)


@torch.library.register_fake("esper::norm_relu_pool_forward")  # type: ignore[untyped-decorator]
@torch.library.register_fake("esper::norm_relu_pool")  # type: ignore[untyped-decorator]
def _fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    eps: float,
    pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels, height, width = input.shape
    if pool:
        height //= 2
        width //= 2
    output = torch.empty(
        (batch, channels, height, width),
        dtype=input.dtype,
        device=input.device,
        memory_format=torch.channels_last,
    )
    statistics = input.new_empty((len(STATISTICS), channels), dtype=torch.float32)
    choice = input.new_empty((0,), dtype=torch.uint8)
    if pool:
        choice = torch.empty_like(output, dtype=torch.uint8)
    return output, statistics, choice


@torch.library.register_fake("esper::norm_relu_pool_backward")  # type: ignore[untyped-decorator]
def _fake_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    gradient = torch.empty_like(input, memory_format=torch.channels_last)
    return gradient, torch.empty_like(weight), torch.empty_like(bias)


class NormReluPool(_NormBase):
    """Replaces ``nn.BatchNorm2d``, ``F.relu`` and, with ``pool``, ``F.max_pool2d(..., 2)``.

    Parameters, buffers and state_dict are those of ``nn.BatchNorm2d``. A call may leave out the pool, to put an
    operation between ReLU and a pool outside, with bit-identical results. The operator supports float32 and bfloat16
    inputs in channels_last with float32 parameters. Other inputs, and forward-mode derivatives, use the three PyTorch
    functions, which is an error with ``ESPER_REQUIRE_NATIVE=1``; :meth:`unserved` gives the reason.

    It is no subclass of ``nn.BatchNorm2d``: tools that replace those by another class, such as
    ``nn.SyncBatchNorm.convert_sync_batchnorm``, would drop ReLU and pool. They leave this module as it is; for such a
    tool, put the modules of :meth:`unfused` in its place.
    """

    def __init__(self, num_features: int, *args: Any, pool: bool = False, **kwargs: Any) -> None:
        """Takes the arguments of ``nn.BatchNorm2d``, and ``pool``."""
        super().__init__(num_features, *args, **kwargs)
        self.pool = pool

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 4:
            raise ValueError(f"expected an input of 4 dimensions, got {input.dim()}")

    def unserved(self, input: Tensor) -> str | None:
        """Returns the reason why the operator does not support this input ``[N, C, H, W]``; None if it does."""
        if input.device.type == "cuda" and not _native.cuda_loaded():
            return "esper._C_cuda is missing; `esper info` shows the reason"
        if input.device.type not in ("cpu", "cuda", "meta"):
            return f"there is no kernel for {input.device.type}"
        if input.dim() != 4 or not input.is_contiguous(memory_format=torch.channels_last):
            return "the input is not [N, C, H, W] in channels_last"
        if input.dtype not in _DTYPES:
            return f"the input is {input.dtype}, not float32 or bfloat16"
        if self.weight is None or self.bias is None or self.weight.dtype != torch.float32:
            return "the module has no float32 weight and bias"
        if input.numel() == 0:
            return "the input is empty"
        if forward_ad._current_level >= 0:
            return "the operator has no forward-mode derivative"
        return None

    def unfused(self) -> nn.Sequential:
        """Returns a copy as PyTorch's modules: ``nn.BatchNorm2d``, ``nn.ReLU`` and, with ``pool``, ``nn.MaxPool2d``."""
        norm = nn.BatchNorm2d(self.num_features, self.eps, self.momentum, self.affine, self.track_running_stats)
        norm._parameters = copy.deepcopy(self._parameters)
        norm._buffers = copy.deepcopy(self._buffers)
        layers = nn.Sequential(norm, nn.ReLU())
        if self.pool:
            layers.append(nn.MaxPool2d(2))
        return layers.train(self.training)

    def forward(self, input: Tensor, pool: bool | None = None) -> Tensor:
        """Maps ``[N, C, H, W]`` to the same shape, or with ``pool`` to ``[N, C, H // 2, W // 2]``; the dtype stays.

        ``pool`` replaces that of the module for this call.
        """
        if pool is None:
            pool = self.pool
        reason = self.unserved(input)
        if reason is not None:
            _native.refuse_fallback("NormReluPool goes through the three PyTorch functions", reason)
            output = F.relu(nn.BatchNorm2d.forward(self, input))  # type: ignore[arg-type]
            return F.max_pool2d(output, 2) if pool else output

        gathered = not self.training and self.running_mean is not None
        output, statistics, _ = norm_relu_pool(
            input,
            self.weight,
            self.bias,
            self.running_mean if gathered else None,
            self.running_var if gathered else None,
            self.eps,
            pool,
        )
        if self.training and self.running_mean is not None:
            _update(self.running_mean, self.running_var, self.num_batches_tracked, statistics, self.momentum)
        return output

    def extra_repr(self) -> str:
        """Adds ``pool`` to the line of ``nn.BatchNorm2d``."""
        return f"{super().extra_repr()}, pool={self.pool}"  # type: ignore[no-untyped-call]
