"""SGD whose step is one operator over all tensors of one optimizer, or of many."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from esper.ops import _native
from esper.ops.optimizer import LightOptimizer, Stepped, in_layout_of, recomputed_loss, refuse_options

_native.not_differentiable("sgd_step_", in_place=True)

_step = torch.ops.esper.sgd_step_.default

# Options of torch.optim.SGD that this optimizer lacks, with their equivalent values; its state includes all of them.
_FIXED = {"dampening": 0, "maximize": False, "differentiable": False}
_IGNORED = {"foreach": None, "fused": None}


class SGD(LightOptimizer):
    """``torch.optim.SGD`` with dampening 0, whose step is one operator that reads changing values from device memory.

    The learning rate of each group is a 0-d float64 tensor on the device of its parameters, which learning rate
    schedulers fill in place; a captured step reads the new value. Momentum buffers start at zero. Parameters must be
    float32, bfloat16 or float64 on one device; they are skipped while their gradient is None.

    ``state_dict`` is compatible with ``torch.optim.SGD``: each loads the other's.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves scale and found_inf to `step`, without a sync

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
            **_FIXED,
            **_IGNORED,
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

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's has overloads
        self,
        closure: Callable[[], float] | None = None,
        *,
        clip_coef: Tensor | None = None,
    ) -> float | None:
        """Steps all groups by :func:`sgd_step` with ``clip_coef``; returns the loss that ``closure`` recomputes."""
        loss = recomputed_loss(closure)
        # The attributes are set by torch's GradScaler.
        sgd_step(
            [self],
            clip_coef,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )
        return loss

    def zero_state(self) -> None:
        """Zeroes all momentum buffers in place, or allocates them the first time."""
        for group in self.param_groups:
            if not group["momentum"]:
                continue
            for parameter in group["params"]:
                self._momentum_of(parameter).zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as other optimizers do; tensors of groups become floats, which waits for the device."""
        state: dict[str, Any] = super().state_dict()
        for group in state["param_groups"]:
            for name, value in group.items():
                if isinstance(value, Tensor):
                    group[name] = value.item()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of this optimizer or of ``torch.optim.SGD``; learning rate tensors are filled in place.

        Raises:
            ValueError: other groups, or an option of ``torch.optim.SGD`` that this optimizer lacks.
        """
        refuse_options(state_dict, _FIXED, "SGD")
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict(cast(dict[str, Any], state_dict))
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate.fill_(float(group["lr"]))
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                buffer = state.get("momentum_buffer")
                if buffer is not None:
                    state["momentum_buffer"] = in_layout_of(parameter, buffer)

    def _momentum_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return cast(Tensor, state["momentum_buffer"])


@torch.no_grad()
def sgd_step(
    optimizers: Iterable[SGD],
    clip_coef: Tensor | None = None,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Steps all groups of all optimizers in one call of the operator, without waiting for a GPU.

    Args:
        optimizers: optimizers with equal momentum and nesterov, whose parameters are on one device.
        clip_coef: float32 or float64 ``[G]`` on that device: factors of the gradients of the parameter groups, in order
            through all optimizers; None is 1. A group with a factor of 0 or NaN keeps its parameters and momentum.
        grad_scale: one number on that device, by which the loss was multiplied.
        found_inf: one number on that device; if it is not 0, nothing is stepped.

    Raises:
        ValueError: different momentum or nesterov.
        RuntimeError: tensors on other devices or with other shapes or dtypes than their parameters.
    """
    stepped = Stepped(optimizers)
    kinds = {(float(group["momentum"]), bool(group["nesterov"])) for group in stepped.groups}
    if len(kinds) > 1:
        raise ValueError(f"groups that are stepped together have one (momentum, nesterov), not {sorted(kinds)}")
    if not stepped.params:
        return
    ((momentum, nesterov),) = kinds

    buffers = []
    if momentum != 0:
        for optimizer, parameter in zip(stepped.owners, stepped.params, strict=True):
            buffers.append(optimizer._momentum_of(parameter))
    _step(
        stepped.params,
        stepped.grads,
        buffers,
        stepped.numbers,
        stepped.rates,
        stepped.decays,
        clip_coef,
        grad_scale,
        found_inf,
        momentum,
        nesterov,
    )
    torch.autograd.graph.increment_version(stepped.params)
