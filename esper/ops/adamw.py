"""AdamW whose step is one operator over all tensors of one optimizer, or of many."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor

from esper.ops import _native
from esper.ops.optimizer import LightOptimizer, Stepped, in_layout_of, recomputed_loss, refuse_options

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

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's has overloads
        self,
        closure: Callable[[], float] | None = None,
        *,
        clip_coef: Tensor | None = None,
    ) -> float | None:
        """Steps all groups by :func:`adamw_step`, with one ``clip_coef``; returns the loss of ``closure``."""
        loss = recomputed_loss(closure)
        if clip_coef is not None:
            clip_coef = clip_coef.view(1)
        # The attributes are set by torch's GradScaler.
        adamw_step(
            [self],
            clip_coef,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )
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
        refuse_options(state_dict, _FIXED, "AdamW")
        before = self.param_groups  # replaced by loading
        rates = [float(saved["lr"]) for saved in state_dict["param_groups"]]
        with_rates = zip(before, rates, strict=False)  # torch refuses other groups below
        for (group, rate), (other, other_rate) in combinations(with_rates, 2):
            if group["lr"] is other["lr"] and rate != other_rate:
                raise ValueError(f"groups that share a learning rate were saved with {rates}")

        super().load_state_dict(cast(dict[str, Any], state_dict))
        for group, old, rate in zip(self.param_groups, before, rates, strict=True):
            for option in ("lr", "fused", "capturable"):
                group[option] = old[option]
            group["lr"].fill_(rate)
            for parameter in group["params"]:
                if self.state.get(parameter):
                    self._adopt(parameter)

    def _adopt(self, parameter: Tensor) -> None:
        """Brings a loaded state to the device of the count and to the layout of the moments that the operator needs."""
        state = self.state[parameter]
        state["step"] = torch.as_tensor(state["step"]).to(parameter.device, torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = in_layout_of(parameter, state[name])


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
    stepped = Stepped(optimizers)
    kinds = {(*map(float, group["betas"]), float(group["eps"])) for group in stepped.groups}
    if len(kinds) > 1:
        raise ValueError(f"groups that are stepped together have one (beta1, beta2, eps), not {sorted(kinds)}")
    if not stepped.params:
        return
    ((beta1, beta2, eps),) = kinds

    steps = []
    means = []
    squares = []
    for optimizer, parameter in zip(stepped.owners, stepped.params, strict=True):
        step, mean, square = optimizer.state_of(parameter)
        steps.append(step)
        means.append(mean)
        squares.append(square)
    if clip_coef is not None:
        clip_coef = _of_groups(clip_coef, optimizers)
    _step(
        stepped.params,
        stepped.grads,
        means,
        squares,
        steps,
        stepped.numbers,
        stepped.rates,
        stepped.decays,
        clip_coef,
        grad_scale,
        found_inf,
        beta1,
        beta2,
        eps,
    )
    torch.autograd.graph.increment_version(stepped.params)


def _of_groups(coef: Tensor, optimizers: Sequence[AdamW]) -> Tensor:
    """Repeats the coefficient of each optimizer for its groups: ``[len(optimizers)]`` to ``[G]``."""
    counts = {len(optimizer.param_groups) for optimizer in optimizers}
    if len(counts) > 1:
        raise ValueError(f"optimizers that are clipped together have equally many groups, not {sorted(counts)}")
    (count,) = counts
    return coef[:, None].expand(-1, count).reshape(-1)
