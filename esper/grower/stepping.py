"""Steps of an optimizer that someone else made and perhaps wrapped: which object is asked, and hooks around a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper.config import ConfigError

UNFIT = {
    "torch.LBFGS": "it updates one group only",
    "torch.Muon": "it updates matrices only, and seeds have parameters of any shape; if another optimizer updates the "
    "other parameters, pass that one",
    "torch.SparseAdam": "it updates parameters with sparse gradients only",
    "timm.Adahessian": "it knows only the parameters that it was made with",
}
"""Optimizers of torch and timm that cannot update seeds, and why."""

AROUND = ("optimizer", "base_optimizer", "whole")
"""Attributes of wrappers that leave each step to the optimizer inside: those of accelerate, of sharpness-aware
minimization, and of the views that schedules have."""
BESIDE = ("_base_optimizer", "base")
"""Attributes of wrappers whose step goes on after the inner one, as timm's Lookahead and schedulefree's wrappers do."""

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


def inside(wrapper: object, attributes: tuple[str, ...]) -> Any:
    """Returns the object in the innermost of nested wrappers with these attributes, or ``wrapper`` itself."""
    for name in attributes:
        inner = getattr(wrapper, name, None)
        if inner is not wrapper and callable(getattr(inner, "step", None)):
            return inside(inner, attributes)
    return wrapper


def innermost(optimizer: object) -> Any:
    """Returns the optimizer in all wrappers of ``optimizer``, or ``optimizer`` itself, whatever it is."""
    return inside(optimizer, AROUND + BESIDE)


def unwrapped(optimizer: object) -> Optimizer:
    """Returns the torch optimizer inside ``optimizer``, which may be wrapped, or whose step may be part of another.

    Raises ConfigError if there is none, or if it cannot update seeds.
    """
    inner = innermost(optimizer)
    if not isinstance(inner, Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    kind = type(inner)
    library = kind.__module__.partition(".")[0]
    name = kind.__name__
    reason = UNFIT.get(f"{library}.{name}")
    if reason is not None:
        raise ConfigError(f"{name} cannot update seeds: {reason}; or use another optimizer, such as AdamW or SGD")
    return inner


def hook_steps(
    optimizer: object,
    before: Before,
    after: After,
) -> None:
    """Calls ``before`` and ``after`` around each step of ``optimizer``, with the arguments of torch's step hooks.

    The hooks stay for the optimizer's life.
    """
    stepped = inside(optimizer, AROUND)
    if isinstance(stepped, Optimizer) and hasattr(type(stepped).step, "hooked"):
        stepped.register_step_pre_hook(before)
        stepped.register_step_post_hook(after)
        return
    # Lookahead and the wrappers of schedulefree do not run torch's hooks, and read gradients before and after the
    # inner step. A method, because schedulers of torch wrap the function of one.
    step = stepped.step

    def hooked(self: Any, *arguments: Any, **keywords: Any) -> Any:
        passed: tuple[Any, ...] = (self, *arguments)
        if self is not stepped:  # a copy
            return type(self).step(*passed, **keywords)
        changed = before(self, passed, keywords)
        if changed is not None:
            passed, keywords = changed
        result = step(*passed[1:], **keywords)
        after(self, passed, keywords)
        return result

    stepped.step = MethodType(hooked, stepped)


def live_scalers() -> list[torch.amp.GradScaler]:
    """Returns the GradScalers of this process that are enabled: an optimizer does not know the one that steps it.

    This is a search of all objects, and takes a tenth of a second.
    """
    scalers = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.amp.GradScaler)]
    return [scaler for scaler in scalers if scaler.is_enabled()]


def stepping_scaler(scalers: Iterable[torch.amp.GradScaler], *optimizers: object) -> torch.amp.GradScaler | None:
    """Returns the one of ``scalers`` that has unscaled the gradients of an optimizer for the present step, or None."""
    for scaler in scalers:
        for optimizer in optimizers:
            state = scaler._per_optimizer_states.get(id(optimizer))
            if state is not None and state["found_inf_per_device"]:
                return scaler
    return None


class ScalerSearch:
    """Finds the GradScaler of a step.

    A search takes longer than an epoch of a small loop. So a loop in which none has been found is searched after 0, 1,
    2, 4, 8 epochs and so on, in the first step; one that has used a scaler may make others, and is searched in every
    epoch in which none of the known ones steps.
    """

    def __init__(self) -> None:
        self._known: list[torch.amp.GradScaler] = []
        self._epochs = 0
        self._due = True

    def next_epoch(self) -> None:
        self._epochs += 1
        is_power_of_two = self._epochs & (self._epochs - 1) == 0
        self._due = is_power_of_two or bool(self._known)

    def of_step(self, *optimizers: object) -> torch.amp.GradScaler | None:
        """Returns the scaler that has unscaled the gradients of one of ``optimizers`` for the present step, or None."""
        scaler = stepping_scaler(self._known, *optimizers)
        if scaler is None and self._due:
            self._due = False
            self._known = live_scalers()
            scaler = stepping_scaler(self._known, *optimizers)
        return scaler


def unscaling(scaler: torch.amp.GradScaler | None, optimizer: object) -> Tensor | None:
    """Returns the factor, a scalar, that undoes the scale of gradients that ``scaler`` has not seen.

    None: nothing is to be undone, because there is no scaler, or because the step itself does so, as fused ones do.
    """
    if scaler is None or getattr(optimizer, "grad_scale", None) is not None:
        return None
    scale = scaler._get_scale_async()
    if scale is None:
        return None
    return scale.double().reciprocal().float()
