"""AdamW whose step is one operator over all tensors of one optimizer, or of many."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor

from esper.ops import _native
from esper.ops.optimizer import LightOptimizer

_native.not_differentiable("adamw_step_", in_place=True)

_step = torch.ops.esper.adamw_step_.default

# Options of torch.optim.AdamW that this optimizer lacks, with the values that are equivalent.
_FIXED = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}


class AdamW(LightOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW`` (Loshchilov and Hutter 2019), whose step is one operator that also clips and skips.

    Only parameters of two dimensions or more decay, not biases and the scales of normalisation layers. Parameters must
    be float32, bfloat16 or float64 on one device, and are skipped while their gradient is None. ``state_dict`` is that
    of ``torch.optim.AdamW``: each loads the other's.
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

        ``lr`` is a float32 or float64 scalar on the device of ``params``, which all groups use as it is: to change it,
        fill it.

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
        scaler = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}  # set by torch's GradScaler
        adamw_step([self], None if clip_coef is None else clip_coef.view(1), **scaler)
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

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of this optimizer or of ``torch.optim.AdamW``; the tensor of the learning rate is filled.

        Raises:
            ValueError: other groups, several rates for groups that share one, or an option that this optimizer lacks.
        """
        for saved in state_dict["param_groups"]:
            for name, value in _FIXED.items():
                if saved.get(name, value) != value:
                    raise ValueError(f"saved with {name}={saved[name]!r}, and esper.ops.AdamW only does {value!r}")
        own = [{name: group[name] for name in ("lr", "fused", "capturable")} for group in self.param_groups]
        rates = [float(saved["lr"]) for saved in state_dict["param_groups"]]
        pairs = combinations(zip(own, rates, strict=False), 2)  # torch refuses other groups below
        if any(a["lr"] is b["lr"] and x != y for (a, x), (b, y) in pairs):
            raise ValueError(f"groups that share a learning rate were saved with {rates}")
        super().load_state_dict(cast(dict[str, Any], state_dict))
        for group, mine, rate in zip(self.param_groups, own, rates, strict=True):
            group.update(mine)
            group["lr"].fill_(rate)
            for parameter in group["params"]:
                if self.state.get(parameter):
                    self._adopt(parameter)

    def _adopt(self, parameter: Tensor) -> None:
        """Brings a loaded state to the device of the count and to the layout of the moments that the operator needs."""
        state = self.state[parameter]
        state["step"] = torch.as_tensor(state["step"]).to(parameter.device, torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            if state[name].stride() != parameter.stride():
                state[name] = torch.zeros_like(parameter).copy_(state[name])


@torch.no_grad()
def adamw_step(
    optimizers: Sequence[AdamW],
    clip_coef: Tensor | None = None,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Steps all groups of all optimizers in one call of the operator, without waiting for a GPU.

    Args:
        optimizers: optimizers with equal betas and eps, whose parameters are on one device.
        clip_coef: float32 or float64 ``[len(optimizers)]`` on that device: factors of the gradients of each optimizer;
            None is 1. An optimizer with a factor of 0 or NaN keeps its parameters, moments and counts of steps.
        grad_scale: one number on that device, by which the loss was multiplied.
        found_inf: one number on that device; if it is not 0, nothing is stepped.

    Raises:
        ValueError: different betas or eps; with ``clip_coef``, different numbers of groups.
        RuntimeError: tensors on other devices or with other shapes or dtypes than their parameters.
    """
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    kinds = {(*map(float, group["betas"]), float(group["eps"])) for _, group in groups}
    if len(kinds) > 1:
        raise ValueError(f"groups that are stepped together have one (beta1, beta2, eps), not {sorted(kinds)}")
    stepped = [(number, p) for number, (_, group) in enumerate(groups) for p in group["params"] if p.grad is not None]
    if not stepped:
        return
    ((beta1, beta2, eps),) = kinds
    params = [parameter for _, parameter in stepped]
    states = [groups[number][0].state_of(parameter) for number, parameter in stepped]
    _step(
        params,
        [parameter.grad for parameter in params],
        [mean for _, mean, _ in states],
        [square for _, _, square in states],
        [step for step, _, _ in states],
        [number for number, _ in stepped],
        [group["lr"] for _, group in groups],
        [float(group["weight_decay"]) for _, group in groups],
        None if clip_coef is None else _of_groups(clip_coef, optimizers),
        grad_scale,
        found_inf,
        beta1,
        beta2,
        eps,
    )
    torch.autograd.graph.increment_version(params)


def _of_groups(coef: Tensor, optimizers: Sequence[AdamW]) -> Tensor:
    """Repeats the coefficient of each optimizer for its groups: ``[len(optimizers)]`` to ``[G]``."""
    counts = {len(optimizer.param_groups) for optimizer in optimizers}
    if len(counts) > 1:
        raise ValueError(f"optimizers that are clipped together have equally many groups, not {sorted(counts)}")
    (count,) = counts
    return coef[:, None].expand(-1, count).reshape(-1)
