"""AdamW whose fused step reads the learning rate and the clip coefficients from device memory."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from esper.ops.optimizer import LightOptimizer


class AdamW(LightOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW`` (Loshchilov and Hutter 2019), fused, whose step also clips and skips on the device.

    Only parameters of two dimensions or more decay, not biases and the scales of normalisation layers. Parameters must
    be float32, bfloat16 or float64 on one device, and are skipped while their gradient is None. ``state_dict`` is that
    of ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        """Takes the arguments of ``torch.optim.AdamW``, but a sequence of parameters, and a rate that is a tensor.

        ``lr`` is a float32 scalar on the device of ``params``, which all groups use as it is: to change it, fill it.

        Raises ValueError for numbers out of range.
        """
        groups: list[dict[str, Any]] = [
            {"params": [p for p in params if p.dim() > 1]},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ]
        capturable = any(p.is_cuda for p in params)
        super().__init__(groups, lr, betas, eps, weight_decay, fused=True, capturable=capturable)

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's has overloads
        self, closure: Callable[[], float] | None = None, *, clip_coef: Tensor | None = None
    ) -> float | None:
        """Steps all groups by :func:`adamw_step`, with one ``clip_coef``; returns the loss of ``closure``."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        adamw_step([self], None if clip_coef is None else clip_coef.view(1))
        return loss

    def zero_state(self) -> None:
        """Zeroes moments and counts of steps in place, or allocates them the first time."""
        for group in self.param_groups:
            for parameter in group["params"]:
                for value in self.state_of(parameter):
                    value.zero_()

    def state_of(self, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the count of steps, and the first and second moments; zeros the first time."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state["step"], state["exp_avg"], state["exp_avg_sq"]


@torch.no_grad()
def adamw_step(optimizers: Sequence[AdamW], clip_coef: Tensor | None = None) -> None:
    """Steps all groups of all optimizers, without waiting for a GPU.

    Args:
        optimizers: optimizers whose parameters are on one device.
        clip_coef: float32 or float64 ``[len(optimizers)]`` on that device: factors of the gradients of each optimizer;
            None is 1. An optimizer with a factor of 0 or NaN keeps its parameters, moments and counts of steps.

    The gradients of clipped optimizers are overwritten on a GPU.
    """
    divisors = skipped = None
    if clip_coef is not None:
        divisors, skipped = clip_coef.float().reciprocal(), (~(clip_coef > 0)).float()  # as the fused step reads them
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not params:
                continue
            steps, means, squares = zip(*(optimizer.state_of(parameter) for parameter in params), strict=True)
            adamw(
                params,
                [parameter.grad for parameter in params],
                list(means),
                list(squares),
                [],
                list(steps),
                fused=True,
                capturable=group["capturable"],
                grad_scale=None if divisors is None else divisors[number],
                found_inf=None if skipped is None else skipped[number],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
