"""SGD whose step is one operator over all tensors of one optimizer, or of many."""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from esper.ops import _native
from esper.ops.optimizer import FusedOptimizer

_native.not_differentiable("sgd_step_", in_place=True)


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
