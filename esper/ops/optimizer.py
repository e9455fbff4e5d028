"""Optimizers that leave torch.compile alone, and those whose step is one operator over all of their tensors."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from itertools import combinations
from types import MappingProxyType
from typing import Any, ClassVar, cast

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
    """``torch.optim.Adam``, bit for bit, without importing the compiler. It takes no closure."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        unwrap(torch.optim.Adam.step)(self)


class FusedOptimizer(LightOptimizer):
    """Base class of optimizers whose step is one operator over all tensors of one optimizer, or of many.

    The operator reads all that changes, such as the learning rate of each group, a 0-d tensor, from device memory, so a
    captured step reads the new values. Parameters must be float32, bfloat16 or float64 on one device, and are skipped
    while their gradient is None. ``state_dict`` is that of the optimizer of ``torch.optim``: each loads the other's.
    """

    operator: ClassVar[Callable[..., None]]
    options: ClassVar[tuple[str, ...]]
    """Names of its last arguments, which groups that are stepped together share."""
    kinds_of_state: ClassVar[int]
    """Number of lists of tensors of state that it takes."""
    fixed: ClassVar[Mapping[str, object]]
    """Options of torch's optimizer that this one lacks, with their equivalent values."""
    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves scale and found_inf to `step`, without a sync

    @abstractmethod
    def state_of(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, ...]:
        """Returns the tensors of a parameter's state in the operator's order; zeros the first time."""

    @abstractmethod
    def options_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        """Returns the values of ``options`` in a group."""

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's has overloads
        self,
        closure: Callable[[], float] | None = None,
        *,
        clip_coef: Tensor | None = None,
    ) -> float | None:
        """Steps all groups by :func:`step_all`; returns the loss that ``closure`` recomputes, None without a closure.

        ``clip_coef`` is one number, or one for each group.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if clip_coef is not None and clip_coef.dim() == 0:
            clip_coef = clip_coef.view(1)
        # The attributes are set by torch's GradScaler.
        step_all(
            [self],
            clip_coef,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )
        return loss

    def zero_state(self) -> None:
        """Zeroes the state in place, or allocates it the first time."""
        for group in self.param_groups:
            for parameter in group["params"]:
                for value in self.state_of(parameter, group):
                    value.zero_()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of this optimizer or of torch's; the tensors of learning rates are filled in place.

        Raises:
            ValueError: other groups, several rates for groups that share one, or an option that this optimizer lacks.
        """
        name = type(self).__name__
        for saved in state_dict["param_groups"]:
            for option, value in self.fixed.items():
                if saved.get(option, value) != value:
                    raise ValueError(f"saved with {option}={saved[option]!r}, and Esper's {name} only does {value!r}")
        before = self.param_groups  # replaced by loading
        rates = [float(saved["lr"]) for saved in state_dict["param_groups"]]
        with_rates = zip(before, rates, strict=False)  # torch refuses other groups below
        for (group, rate), (other, other_rate) in combinations(with_rates, 2):
            if group["lr"] is other["lr"] and rate != other_rate:
                raise ValueError(f"groups that share a learning rate were saved with {rates}")

        super().load_state_dict(cast(dict[str, Any], state_dict))
        for group, old, rate in zip(self.param_groups, before, rates, strict=True):
            for option in {"lr", "fused", "capturable"} & old.keys():
                group[option] = old[option]
            group["lr"].fill_(rate)
            for parameter in group["params"]:
                for name, value in self.state.get(parameter, {}).items():
                    self.state[parameter][name] = _as_operators_need(parameter, name, value)


@torch.no_grad()
def step_all(
    optimizers: Sequence[FusedOptimizer],
    clip_coef: Tensor | None = None,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Steps all groups of all optimizers in one call of their operator, without waiting for a GPU.

    Args:
        optimizers: optimizers of one class with equal options, such as momentum, whose parameters are on one device.
        clip_coef: float32 or float64 ``[len(optimizers)]``, or ``[G]`` for all parameter groups, on that device:
            factors of gradients; None is 1. With a factor of 0 or NaN, parameters and their state stay as they are.
        grad_scale: one number on that device, by which the loss was multiplied.
        found_inf: one number on that device; if it is not 0, nothing is stepped.

    Raises:
        ValueError: different options; with a coefficient for each optimizer, different numbers of groups.
        RuntimeError: tensors on other devices or with other shapes or dtypes than their parameters.
    """
    step = gathered(optimizers)
    if step is None:
        return
    if clip_coef is not None and len(clip_coef) != len(step.rates):
        clip_coef = _of_groups(clip_coef, optimizers)
    step.operator(*step.arguments(clip_coef, grad_scale, found_inf))
    torch.autograd.graph.increment_version(step.params)


@dataclass(frozen=True)
class GatheredStep:
    """The step of many optimizers as one call of their operator."""

    operator: Callable[..., None]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    """A list of tensors for each kind of state."""
    group_of: list[int]
    """The group of each parameter, [N]."""
    rates: list[Tensor]
    """Learning rates of the groups, [G]."""
    decays: list[float]
    options: tuple[float, ...]

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
    """Gathers the parameters that have a gradient, with what their step needs; None without any.

    Raises ValueError for different options.
    """
    if not optimizers:
        return None
    kind = type(optimizers[0])
    params: list[Tensor] = []
    grads: list[Tensor] = []
    states: list[list[Tensor]] = [[] for _ in range(kind.kinds_of_state)]
    group_of: list[int] = []
    rates: list[Tensor] = []
    decays: list[float] = []
    options = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options.add(optimizer.options_of(group))
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                params.append(parameter)
                grads.append(parameter.grad)
                group_of.append(len(rates))
                for values, value in zip(states, optimizer.state_of(parameter, group), strict=False):
                    values.append(value)
            rates.append(group["lr"])
            decays.append(float(group["weight_decay"]))
    if len(options) > 1:
        names = ", ".join(kind.options)
        raise ValueError(f"groups that are stepped together have one ({names}), not {sorted(options)}")
    if not params:
        return None
    return GatheredStep(kind.operator, params, grads, states, group_of, rates, decays, options.pop())


def _of_groups(coef: Tensor, optimizers: Sequence[Optimizer]) -> Tensor:
    """Repeats the coefficient of each optimizer for its groups: ``[len(optimizers)]`` to ``[G]``."""
    counts = {len(optimizer.param_groups) for optimizer in optimizers}
    if len(counts) > 1:
        raise ValueError(f"optimizers that are clipped together have equally many groups, not {sorted(counts)}")
    (count,) = counts
    return coef[:, None].expand(-1, count).reshape(-1)


def _as_operators_need(parameter: Tensor, name: str, value: Any) -> Any:
    """Returns a loaded count of steps on the device of its parameter, and any other tensor in the layout of it."""
    if name == "step":
        return torch.as_tensor(value).to(parameter.device, torch.float32)
    if value is None or value.stride() == parameter.stride():
        return value
    return torch.zeros_like(parameter).copy_(value)  # keeps the layout of the parameter


class SGD(FusedOptimizer):
    """``torch.optim.SGD`` with dampening 0, whose step is one operator that also clips and skips.

    The learning rate of each group is a float64 tensor of its own, which learning rate schedulers fill in place.
    Momentum buffers start at zero.
    """

    operator = torch.ops.esper.sgd_step_.default
    options = ("momentum", "nesterov")
    kinds_of_state = 1
    fixed = MappingProxyType({"dampening": 0, "maximize": False, "differentiable": False})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        """Takes the arguments of ``torch.optim.SGD``.

        If ``lr`` is a 0-d tensor on the parameters' device, the first group uses that very tensor.

        Raises:
            ValueError: a negative number, or nesterov without momentum.
        """
        for name, value in (("lr", float(lr)), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if nesterov and momentum == 0:
            raise ValueError("nesterov needs momentum")
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            **self.fixed,
            "foreach": None,  # as the state of torch.optim.SGD has them
            "fused": None,
        }
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as other optimizers do; its learning rate becomes a tensor of its own."""
        super().add_param_group(param_group)
        *others, group = self.param_groups
        rate = group["lr"]
        device = torch.device("cpu")
        if group["params"]:
            device = group["params"][0].device
        if not isinstance(rate, Tensor) or rate.device != device:
            group["lr"] = torch.tensor(float(rate), dtype=torch.float64, device=device)
        elif any(rate is other["lr"] for other in others):
            group["lr"] = rate.clone()  # else a scheduler would fill one tensor once per group

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as other optimizers do; tensors of groups become floats, which waits for the device."""
        state: dict[str, Any] = super().state_dict()
        for group in state["param_groups"]:
            for name, value in group.items():
                if isinstance(value, Tensor):
                    group[name] = value.item()
        return state

    def state_of(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, ...]:
        """Returns the momentum buffer, zeros the first time; () without momentum."""
        if not group["momentum"]:
            return ()
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return (state["momentum_buffer"],)

    def options_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        return float(group["momentum"]), bool(group["nesterov"])


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
