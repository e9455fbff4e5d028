"""The number format of training and validation passes. Weights, their gradients and momentum stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from esper._host import cpu_features
from esper.config import ConfigError, Precision

AMPERE = (8, 0)
"""Compute capability of the first GPUs whose tensor cores multiply bfloat16."""
HAS_AUTOCAST = ("cpu", "cuda")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for it; without them bfloat16 is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= AMPERE
    return device.type == "cpu" and cpu_features().get("avx512bf16", False)


def concrete(precision: Precision, device: torch.device) -> Precision:
    """``auto`` is bfloat16 where the device multiplies it, and float32 elsewhere; what is named is what is used.

    Raises ConfigError for 16 bits on a device that torch has no autocast for.
    """
    if precision == "auto":
        return "bfloat16" if multiplies_bfloat16(device) else "float32"
    if precision != "float32" and device.type not in HAS_AUTOCAST:
        raise ConfigError(
            f"task.precision is {precision}, which works on {' and '.join(HAS_AUTOCAST)}; on {device.type} it has to "
            "be float32"
        )
    return precision


def image_dtype(precision: Precision) -> torch.dtype:
    """What images that lie in memory as bytes are turned into for passes in ``precision``, a concrete one."""
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def casting(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Passes in here compute with ``precision``, a concrete one, where torch's autocast says that they may.

    Weights are cast at every use: torch keeps casts in one place for all threads, which each lane empties at the end of
    its pass, so that it would depend on the other lanes how the gradient of a layer that runs twice is rounded.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision), cache_enabled=False)


class Arithmetic:
    """One env's number format and, for float16, the scale of its loss.

    Gradients in float16 vanish below 6e-8, so the loss is scaled up as far as they allow (Micikevicius et al. 2018,
    "Mixed Precision Training"). The scale belongs to the env and changes on its lane only.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision, self.device = precision, device
        self._scaler = torch.amp.GradScaler(device.type) if precision == "float16" else None
        self._at_first = {} if self._scaler is None else self._scaler.state_dict()
        self._one = torch.ones((), device=device)
        self._unscaled = False

    def reset(self) -> None:
        """The scale as it is at first, in the storage that it has unless a step was left half done: for another host,
        or one that was put back."""
        if self._unscaled:
            self.load_state_dict(self._at_first)
        elif self._scaler is not None:
            self._scaler.load_state_dict(self._at_first)

    def state_dict(self) -> dict[str, Any]:
        """The scale as it is now; empty where there is none."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scale of :meth:`state_dict`, also when a step was left half done."""
        if self._scaler is not None:
            self._scaler = torch.amp.GradScaler(self.device.type)  # an old one may have taken note of that step
            self._scaler.load_state_dict(state)
            self._unscaled = False

    @property
    def image_dtype(self) -> torch.dtype:
        """See :func:`image_dtype`."""
        return image_dtype(self.precision)

    @property
    def overflows(self) -> bool:
        """Whether the loss is scaled, so that gradients overflow now and then."""
        return self._scaler is not None

    def excuses(self, finite: Tensor) -> Tensor | None:
        """Of gradients that are ``finite`` or not, bool [...], those that the loss's scale alone may have made too
        large, which says nothing about a network: all that are not, until it has come down to 1. None for none."""
        return None if self._scaler is None else ~finite & (self._scaler.scale(self._one) > 1)

    def casting(self) -> AbstractContextManager[object]:
        """See :func:`casting`."""
        return casting(self.precision, self.device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Gradients of scaled losses become those of the losses; what overflowed is not finite."""
        for optimizer in optimizers:
            if self._scaler is not None and any(_has_gradient(p) for p in optimizer.param_groups[0]["params"]):
                self._scaler.unscale_(optimizer)
                self._unscaled = True

    def update(self) -> None:
        """After a step: a smaller scale where a gradient overflowed, a larger one after many steps without."""
        if self._scaler is not None and self._unscaled:
            self._scaler.update()
            self._unscaled = False


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None
