"""Optimizers that leave torch.compile alone, and those whose step is one operator over all of their tensors."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from itertools import combinations
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from esper.ops import _native

_native.not_differentiable("adamw_step_", "sgd_step_", in_place=True)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
"""Data types of parameters."""


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
    """Base class of optimizers whose step is one operator over all tensors of one optimizer, or of many.

    The learning rate of each group is a 0-d float64 tensor that no other group shares. The operator reads it from
    device memory, so a captured step reads the value that a scheduler filled in. ``group["lr"] = 0.1`` works as well:
    the next step turns a number into a tensor. Options that are written to a group are read by the next step.

    Parameters must be float32, bfloat16 or float64 on one device, and are skipped while their gradient is None.
    ``state_dict`` is that of the optimizer of ``torch.optim``: each loads the other's.
    """

    operator: ClassVar[Callable[..., None]]
    options: ClassVar[tuple[str, ...]]
    """Names of its last arguments, which all groups of one call share."""
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as other optimizers do; its learning rate becomes a tensor of its own.

        Raises ValueError for negative numbers, and for options of torch's optimizer that this optimizer lacks.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
        except ValueError:
            self.param_groups.pop()
            raise
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64, device=_device_of(self))

    def _check(self, group: dict[str, Any]) -> None:
        numbers = dict(zip(self.options, self.options_of(group), strict=True))
        for name in ("lr", "weight_decay"):
            numbers[name] = float(group[name])
        for name, value in numbers.items():
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if len(set(group["params"])) < len(group["params"]):
            raise ValueError("a parameter is in one group twice, and would be stepped twice")
        for parameter in group["params"]:
            if parameter.dtype not in DTYPES:
                expected = ", ".join(map(str, DTYPES))
                raise ValueError(
                    f"Esper's {type(self).__name__} steps {expected}; got a parameter of {parameter.dtype}"
                )
        self.check_fixed(group)

    def check_fixed(self, group: Mapping[str, Any], where: str = "got") -> None:
        """Raises ValueError if a group has options that this optimizer lacks."""
        for option, value in self.fixed.items():
            if group.get(option, value) != value:
                name = type(self).__name__
                raise ValueError(f"{where} {option}={group[option]!r}, and Esper's {name} only does {value!r}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as other optimizers do; tensors of groups become floats, which waits for the device."""
        state: dict[str, Any] = super().state_dict()
        for group in state["param_groups"]:
            for name, value in group.items():
                if isinstance(value, Tensor):
                    group[name] = value.item()
        return state

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
        for saved in state_dict["param_groups"]:
            self.check_fixed(saved, "saved with")
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
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
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

    Groups with different options, such as momentum, take a call for each value.

    Args:
        optimizers: optimizers of one class whose parameters are on one device.
        clip_coef: float32 or float64 ``[len(optimizers)]``, or ``[G]`` for all parameter groups, on that device:
            factors of gradients; None is 1. With a factor of 0 or NaN, parameters and their state stay as they are.
        grad_scale: one number on that device, by which the loss was multiplied.
        found_inf: one number on that device; if it is not 0, nothing is stepped.

    Raises:
        ValueError: an option that the optimizers lack; with a coefficient for each optimizer, different numbers of
            groups.
        RuntimeError: tensors on other devices or with other shapes or dtypes than their parameters, or sparse ones.
    """
    for step in gathered(optimizers):
        if clip_coef is not None and len(clip_coef) != len(step.rates):
            clip_coef = _of_groups(clip_coef, optimizers)
        try:
            step.operator(*step.arguments(clip_coef, grad_scale, found_inf))
        except NotImplementedError:
            _require_dense(optimizers)
            raise


def _require_dense(optimizers: Sequence[Optimizer]) -> None:
    """Raises RuntimeError if a gradient is sparse."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(p.grad is not None and p.grad.layout is not torch.strided for p in group["params"]):
                name = type(optimizer).__name__
                raise RuntimeError(f"{name} does not step sparse gradients; torch.optim.SparseAdam does") from None


@dataclass(frozen=True)
class GatheredStep:
    """The step of many optimizers as one call of their operator: the parameters whose groups have equal options."""

    operator: Callable[..., None]
    rates: list[Tensor]
    """Learning rates of all groups, [G]."""
    decays: list[float]
    """Weight decays of all groups, [G]."""
    options: tuple[float, ...]
    states: list[list[Tensor]]
    """A list of tensors for each kind of state."""
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    """The group of each parameter, [N]."""

    def arguments(
        self,
        clip_coef: Tensor | None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Returns the arguments of the operator, with one coefficient a group."""
        tensors = (self.params, self.grads, *self.states, self.group_of, self.rates, self.decays)
        return *tensors, clip_coef, grad_scale, found_inf, *self.options


def gathered(optimizers: Sequence[FusedOptimizer]) -> list[GatheredStep]:
    """Gathers the parameters that have a gradient, with what their step needs: a step for each value of the options."""
    steps: dict[tuple[float, ...], GatheredStep] = {}
    rates: list[Tensor] = []
    decays: list[float] = []
    for optimizer in optimizers:
        device = _device_of(optimizer)
        for group in optimizer.param_groups:
            optimizer.check_fixed(group)
            options = optimizer.options_of(group)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if options not in steps:
                    states: list[list[Tensor]] = [[] for _ in range(optimizer.kinds_of_state)]
                    steps[options] = GatheredStep(optimizer.operator, rates, decays, options, states)
                step = steps[options]
                step.params.append(parameter)
                step.grads.append(parameter.grad)
                step.group_of.append(len(rates))
                for values, value in zip(step.states, optimizer.state_of(parameter, group), strict=False):
                    values.append(value)
            rates.append(_rate_of(group, device))
            decays.append(float(group["weight_decay"]))
    return list(steps.values())


def _device_of(optimizer: Optimizer) -> torch.device:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return cast(Tensor, parameter).device
    return torch.device("cpu")


def _rate_of(group: dict[str, Any], device: torch.device) -> Tensor:
    """Returns the learning rate of a group, a tensor on ``device``: a number that was written to it becomes one."""
    rate = group["lr"]
    if not isinstance(rate, Tensor) or rate.device != device:
        rate = torch.tensor(float(rate), dtype=torch.float64, device=device)
        group["lr"] = rate
    return rate


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

    Momentum buffers start at zero.
    """

    operator = staticmethod(_native.writing(torch.ops.esper.sgd_step_.default))
    options = ("momentum", "nesterov")
    kinds_of_state = 1
    fixed = MappingProxyType({"dampening": 0, "maximize": False, "differentiable": False})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **others: Any,
    ) -> None:
        """Takes the arguments of ``torch.optim.SGD``, in its order; every group gets a copy of ``lr``.

        Raises:
            ValueError: a negative number, nesterov without momentum, or an option that this optimizer lacks.
        """
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            **self.fixed,
            "dampening": dampening,
            "foreach": None,  # as the state of torch.optim.SGD has them
            "fused": None,
        }
        super().__init__(params, options | _known(others, (*self.fixed, "foreach", "fused")))

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError("nesterov needs momentum")

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

    Only parameters of two dimensions or more decay, not biases and the scales of normalisation layers; a group that is
    given as a dict decays as it says.
    """

    operator = staticmethod(_native.writing(torch.ops.esper.adamw_step_.default))
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
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **others: Any,
    ) -> None:
        """Takes the arguments of ``torch.optim.AdamW``, in its order; every group gets a copy of ``lr``.

        Parameters that are not in dicts make two groups: those that decay, and those that do not.

        Raises ValueError for numbers out of range and options that this optimizer lacks.
        """
        groups = _split(params)
        known = {**self.fixed, "amsgrad": amsgrad}
        known |= _known(others, (*self.fixed, "foreach", "fused", "capturable"))
        self.check_fixed(known)
        super().__init__(
            groups,
            float(lr),
            betas,
            eps,
            weight_decay,
            fused=True,
        )
        for group in self.param_groups:
            group["capturable"] = any(p.is_cuda for p in group["params"])

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


def _known(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns options by keyword. Raises TypeError for one that is not in ``names``."""
    for name in options:
        if name not in names:
            raise TypeError(f"unknown option {name!r}; known: {', '.join(names)}")
    return options


def _split(params: ParamsT) -> Any:
    """Splits parameters into a group that decays and one that does not; groups that are dicts stay."""
    if isinstance(params, Tensor | Mapping):
        return params  # torch refuses it
    found: list[Any] = list(params)
    matrices: list[Any] = []
    vectors: list[Any] = []
    for item in found:
        parameter = item[1] if isinstance(item, tuple) else item  # named parameters are (name, tensor)
        if not isinstance(parameter, Tensor):
            return found
        (matrices if parameter.dim() > 1 else vectors).append(item)
    if not found:
        return found
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if isinstance(found[0], tuple):
        for group in groups:
            group["param_names"] = []  # torch overwrites it, except in an empty group
    return groups
