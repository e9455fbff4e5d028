"""Gradients that cannot be differentiated again."""

from typing import Any

import torch
from torch import Tensor


class Once(torch.autograd.Function):
    """A gradient as a function of what it was computed from, so that differentiating it again is an error.

    ``apply(message, gradient, *inputs)`` returns the gradient; the error has the message.
    """

    @staticmethod
    def forward(ctx: Any, message: str, gradient: Tensor, *inputs: Tensor) -> Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(ctx.message)
