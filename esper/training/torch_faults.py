"""Faults of torch that would end a run, and ways around them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def guard_group_norm(module: nn.Module) -> None:
    """Lay out anew what the GroupNorm layers of ``module`` cannot be given in a training pass.

    torch's kernel on the CPU (2.13) ends the process in the backward pass of features in channels_last that need no
    gradient themselves: such as a seed sees that is incubated.
    """
    for layer in module.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.register_forward_pre_hook(_laid_out_plainly, with_kwargs=True)


def _laid_out_plainly(
    _layer: nn.Module, positional: tuple[Tensor, ...], named: dict[str, Tensor]
) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    h = positional[0] if positional else named["input"]
    if h.device.type == "cpu" and torch.is_grad_enabled() and not h.requires_grad:
        h = h.contiguous()
    return (h,), {}
