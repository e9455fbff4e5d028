"""AdamW whose step is one operator over all tensors of one optimizer, or of many."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from esper.ops import _native
from esper.ops.optimizer import FusedOptimizer

_native.not_differentiable("adamw_step_", in_place=True)


class AdamW(FusedOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW`` (Loshchilov and Hutter 2019), whose step is one operator that also clips and skips.

    Only parameters of two dimensions or more decay, not biases and the scales of normalisation layers.
    """

    operator = torch.ops.esper.adamw_step_.default
    options = ("beta1", "beta2", "eps")
    kinds_of_state = 3
    fixed = MappingProxyType(
        {
            "amsgrad": False,
            "maximize": False,
            "differentiable": False,
            "decoupled_weight_decay": True,
        }
    )

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        """Takes the arguments of ``torch.optim.AdamW``, but a sequence of parameters, and a rate that is a tensor.

        ``lr`` is a float32 or float64 scalar on the device of ``params``, which all groups use as it is: to change it,
        fill it.

        Raises ValueError for numbers out of range.
        """
        matrices = [p for p in params if p.dim() > 1]
        vectors = [p for p in params if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ]
        super().__init__(
            groups,
            lr,
            betas,
            eps,
            weight_decay,
            fused=True,
            capturable=any(p.is_cuda for p in params),
        )

    def state_of(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, ...]:
        """Returns the first and second moments, and the count of steps; zeros the first time."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state["exp_avg"], state["exp_avg_sq"], state["step"]

    def options_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return float(beta1), float(beta2), float(group["eps"])
