"""Protection from a crash in torch's GroupNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def guard_group_norm(module: nn.Module) -> None:
    """Makes inputs of the GroupNorm layers of ``module`` contiguous in training passes if they require no gradient.

    torch's CPU kernel (2.13) crashes the process in the backward pass for channels_last inputs that require no
    gradient, such as the features of an incubating seed.
    """
    for layer in module.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.register_forward_pre_hook(contiguous_input, with_kwargs=True)


def contiguous_input(
    _layer: nn.Module,
    positional: tuple[Tensor, ...],
    named: dict[str, Tensor],
) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """Forward pre-hook of a GroupNorm, see :func:`guard_group_norm`."""
    h = positional[0] if positional else named["input"]
    if h.device.type == "cpu" and torch.is_grad_enabled() and not h.requires_grad:
        h = h.contiguous()
    return (h,), {}
