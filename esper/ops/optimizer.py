"""Optimizers that leave torch.compile alone, and those whose step is one operator over all of their tensors."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from esper.ops import _native

_native.not_differentiable("adamw_step_", "sgd_step_", in_place=True)


class LightOptimizer(Optimizer):
    """``torch.optim.Optimizer`` without the decorator that hides four of its methods from ``torch.compile``.

    At its first call the decorator imports the compiler: a second and 70 MB of every process. Nothing compiles a call
    of these methods.
    """

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)


class Adam(LightOptimizer, torch.optim.Adam):
    """``torch.optim.Adam``, bit for bit, without importing the compiler."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return unwrap(torch.optim.Adam.step)(self, closure)  # type: ignore[no-any-return]


class FusedOptimizer(LightOptimizer):
    """Base class of optimizers whose step is one operator over all tensors of many optimizers.

    The learning rate of each group is a 0-d tensor: the operator reads it from device memory, so a captured step reads
    the value that was filled in. Parameters are float32, bfloat16 or float64 on one device, and are skipped while their
    gradient is None.
    """

    operator: ClassVar[Callable[..., None]]
    kinds_of_state: ClassVar[int]
    """Number of lists of tensors of state that it takes."""

    def __init__(self, params: ParamsT, lr: float | Tensor, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        for group in self.param_groups:
            if not isinstance(group["lr"], Tensor):
                device = next((p.device for p in group["params"]), None)
                group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64, device=device)

    @abstractmethod
    def state_of(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, ...]:
        """Returns the tensors of a parameter's state in the operator's order; zeros the first time."""

    @abstractmethod
    def options_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        """Returns the last arguments of the operator, which all groups of a call share."""

    def step(self, clip_coef: Tensor | None = None) -> None:  # type: ignore[override]  # torch's takes a closure
        """Steps all groups; ``clip_coef`` is a coefficient [1], or one for each group."""
        step_all([self], clip_coef)

    def zero_state(self) -> None:
        """Zeroes the state in place, or allocates it the first time."""
        for group in self.param_groups:
            for parameter in group["params"]:
                for value in self.state_of(parameter, group):
                    value.zero_()


@torch.no_grad()
def step_all(
    optimizers: Sequence[FusedOptimizer],
    clip_coef: Tensor | None = None,
) -> None:
    """Steps all groups of all optimizers in one call of their operator, without waiting for a GPU.

    Args:
        optimizers: optimizers of one class with the same options, whose parameters are on one device.
        clip_coef: float32 or float64 ``[len(optimizers)]``, or ``[G]`` for all parameter groups, on that device:
            factors of gradients; None is 1. With a factor of 0 or NaN, parameters and their state stay as they are.

    Raises RuntimeError for tensors on other devices or with other shapes or dtypes than their parameters.
    """
    step = gathered(optimizers)
    if step is None:
        return
    if clip_coef is not None and len(clip_coef) != len(step.rates):
        # The coefficient of an optimizer is that of each of its groups.
        groups = len(step.rates) // len(optimizers)
        clip_coef = clip_coef[:, None].expand(-1, groups).reshape(-1)
    step.operator(*step.arguments(clip_coef))


@dataclass(frozen=True)
class GatheredStep:
    """The step of many optimizers as one call of their operator: all parameters that have a gradient."""

    operator: Callable[..., None]
    options: tuple[float, ...]
    states: list[list[Tensor]]
    """A list of tensors for each kind of state."""
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    """The group of each parameter, [N]."""
    rates: list[Tensor] = field(default_factory=list)
    """Learning rates of all groups, [G]."""
    decays: list[float] = field(default_factory=list)
    """Weight decays of all groups, [G]."""

    def arguments(
        self,
        clip_coef: Tensor | None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Returns the arguments of the operator, with one coefficient a group."""
        tensors = (self.params, self.grads, *self.states, self.group_of, self.rates, self.decays)
        return *tensors, clip_coef, grad_scale, found_inf, *self.options


def gathered(optimizers: Sequence[FusedOptimizer]) -> GatheredStep | None:
    """Gathers the parameters that have a gradient, with what their step needs; None if there are none."""
    if not optimizers:
        return None
    first = optimizers[0]
    states: list[list[Tensor]] = [[] for _ in range(first.kinds_of_state)]
    step = GatheredStep(first.operator, first.options_of(first.param_groups[0]), states)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step.params.append(parameter)
                step.grads.append(parameter.grad)
                step.group_of.append(len(step.rates))
                for values, value in zip(states, optimizer.state_of(parameter, group), strict=False):
                    values.append(value)
            step.rates.append(group["lr"])
            step.decays.append(float(group["weight_decay"]))
    return step if step.params else None


class SGD(FusedOptimizer):
    """``torch.optim.SGD`` without dampening, whose step is one operator that also clips and skips.

    Momentum buffers start at zero.
    """

    operator = staticmethod(_native.writing(torch.ops.esper.sgd_step_.default))
    kinds_of_state = 1

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)

    def state_of(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, ...]:
        """Returns the momentum buffer, zeros the first time; () without momentum."""
        if not group["momentum"]:
            return ()
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return (state["momentum_buffer"],)

    def options_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        return float(group["momentum"]), bool(group["nesterov"])


class AdamW(FusedOptimizer):
    """``torch.optim.AdamW`` (Loshchilov and Hutter 2019), whose step is one operator that also clips and skips.

    Only parameters of two dimensions or more decay, not biases and the scales of normalisation layers: the first of two
    groups.
    """

    operator = staticmethod(_native.writing(torch.ops.esper.adamw_step_.default))
    kinds_of_state = 3

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        for parameter in params:
            (matrices if parameter.dim() > 1 else vectors).append(parameter)
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        super().__init__(groups, lr, betas=betas, eps=eps, weight_decay=weight_decay)

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
