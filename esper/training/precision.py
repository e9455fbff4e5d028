"""The number format of training and validation passes. Weights, their gradients and momentum keep theirs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from esper._runtime import cpu_features
from esper.config import ConfigError, Precision

AMPERE = (8, 0)
"""Compute capability of the first GPUs whose tensor cores multiply bfloat16."""
HAS_AUTOCAST = ("cpu", "cuda")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Returns True if the device has bfloat16 instructions; without them, bfloat16 is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= AMPERE
    return device.type == "cpu" and cpu_features().get("avx512bf16", False)


def concrete(precision: Precision, device: torch.device) -> Precision:
    """Resolves ``auto``: bfloat16 on devices with instructions for it, float32 elsewhere.

    Other values are returned unchanged. Raises ConfigError for 16 bits on a device without autocast in torch.
    """
    if precision == "auto":
        return "bfloat16" if multiplies_bfloat16(device) else "float32"
    if precision != "float32" and device.type not in HAS_AUTOCAST:
        raise ConfigError(
            f"task.precision is {precision}, which works on {' and '.join(HAS_AUTOCAST)}; on {device.type} it has to "
            "be float32"
        )
    return precision


class Arithmetic:
    """The number format of one host's passes, with ``auto`` resolved, and, for float16, its loss scale.

    Gradients in float16 underflow below 6e-8, so the loss is scaled up as far as possible without overflow
    (Micikevicius et al. 2018, "Mixed Precision Training"). The scale is the host's and changes in its steps only.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision = concrete(precision, device)
        self.device = device
        self._scaler = torch.amp.GradScaler(device.type) if self.precision == "float16" else None
        self._at_first = self.state_dict()
        self._one = torch.ones((), device=device)
        self._unscaled = False

    def reset(self) -> None:
        """Resets the scale for a new or restored host, in place unless a step was left unfinished."""
        if self._unscaled:
            self.load_state_dict(self._at_first)
        elif self._scaler is not None:
            self._scaler.load_state_dict(self._at_first)

    def state_dict(self) -> dict[str, Any]:
        """Returns the current state of the scale; empty without one."""
        if self._scaler is None:
            return {}
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the scale from :meth:`state_dict`, even if a step was left unfinished."""
        if self._scaler is None:
            return
        self._scaler = torch.amp.GradScaler(self.device.type)  # the old one may have recorded that step
        self._scaler.load_state_dict(state)
        self._unscaled = False

    @property
    def image_dtype(self) -> torch.dtype:
        """The dtype to which images stored as bytes are converted."""
        if self.precision == "bfloat16":
            return torch.bfloat16
        return torch.float32

    def overflow_mask(self, finite: Tensor) -> Tensor | None:
        """Marks gradients, bool [...], that may be non-finite only because of the loss scale, not of the network.

        These are all gradients that are not ``finite`` (bool [...]) while the scale is above 1. Returns None without a
        scale.
        """
        if self._scaler is None:
            return None
        # At a scale of 1, no gradient overflows because of it.
        return ~finite & (self._scaler.scale(self._one) > 1)

    def casting(self) -> AbstractContextManager[object]:
        """Returns the autocast context of passes.

        Autocast's weight cache is disabled: it is process-wide and each thread clears it at the end of a pass, so the
        rounding of the gradient of a layer that runs twice would depend on other threads.
        """
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.precision), cache_enabled=False)

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the loss to differentiate, multiplied by the scale if there is one."""
        if self._scaler is None:
            return loss
        return self._scaler.scale(loss)

    def unscale(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Divides gradients by the scale; those that overflowed stay non-finite."""
        if self._scaler is None:
            return
        for optimizer in optimizers:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            if any(parameter.grad is not None for parameter in parameters):
                self._scaler.unscale_(optimizer)
                self._unscaled = True

    def update(self) -> None:
        """Updates the scale after a step: smaller after an overflow, larger after many steps without one."""
        if self._scaler is not None and self._unscaled:
            self._scaler.update()
            self._unscaled = False
