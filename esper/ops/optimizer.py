"""A base of optimizers that leaves torch.compile alone, and what their steps have in common."""

from collections.abc import Callable, Iterable, Mapping
from inspect import unwrap
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

Owner = TypeVar("Owner", bound=Optimizer)


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


class Stepped(Generic[Owner]):
    """All that one call of an operator steps: the groups of some optimizers and their parameters with a gradient."""

    def __init__(self, optimizers: Iterable[Owner]) -> None:
        self.groups: list[dict[str, Any]] = []
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.owners: list[Owner] = []
        """The optimizer of each parameter."""
        self.numbers: list[int] = []
        """The index of each parameter's group in ``groups``."""
        self.rates: list[Tensor] = []
        """The learning rate of each group."""
        self.decays: list[float] = []
        """The weight decay of each group."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self._add(optimizer, group)

    def _add(self, optimizer: Owner, group: dict[str, Any]) -> None:
        number = len(self.groups)
        self.groups.append(group)
        self.rates.append(group["lr"])
        self.decays.append(float(group["weight_decay"]))
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            self.params.append(parameter)
            self.grads.append(parameter.grad)
            self.owners.append(optimizer)
            self.numbers.append(number)


def recomputed_loss(closure: Callable[[], float] | None) -> float | None:
    """Calls the closure of a step with gradients on and returns its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_options(state_dict: Mapping[str, Any], fixed: Mapping[str, object], name: str) -> None:
    """Raises ValueError for saved groups with an option that has another value than the optimizer's ``fixed`` one.

    ``name`` is that of the optimizer, for the message.
    """
    for saved in state_dict["param_groups"]:
        for option, value in fixed.items():
            if saved.get(option, value) != value:
                raise ValueError(f"saved with {option}={saved[option]!r}, and Esper's {name} only does {value!r}")


def in_layout_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Returns ``value`` if it has the strides of ``parameter``, which the operators need; else a copy that has them."""
    if value.stride() == parameter.stride():
        return value
    return torch.zeros_like(parameter).copy_(value)  # keeps the layout of the parameter
