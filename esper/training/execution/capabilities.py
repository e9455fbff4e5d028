"""The tiers and number formats that each device of this machine supports, and why others are missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from esper._runtime import CudaRuntime
from esper.training.precision import multiplies_bfloat16


@dataclass(frozen=True)
class DeviceCapabilities:
    """The tiers and the automatic number format of one device."""

    device: str
    bfloat16: bool
    """Whether the device has instructions for bfloat16, so that ``auto`` chooses it."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Reasons for missing tiers, by tier."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The available tiers."""
        return tuple(tier for tier in ("eager", "compiled", "graph") if tier not in self.missing)

    def __str__(self) -> str:
        not_there = "".join(f"; no {tier}: {why}" for tier, why in self.missing.items())
        precision = "bfloat16" if self.bfloat16 else "float32, it has no instructions for bfloat16"
        return f"steps {', '.join(self.tiers)}{not_there}; auto precision is {precision}"


def offers() -> list[DeviceCapabilities]:
    """Returns the offer of the CPU, then that of each GPU."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    return [offer_of(device) for device in devices]


def offer_of(device: torch.device) -> DeviceCapabilities:
    """Returns what a device supports, without trying; a host may still fail to compile or to be captured."""
    found = {"compiled": why_not_compiled(device), "graph": why_not_captured(device)}
    missing = {tier: why for tier, why in found.items() if why is not None}
    return DeviceCapabilities(str(device), multiplies_bfloat16(device), missing)


def why_not_compiled(device: torch.device, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns what torch.compile lacks for ``device`` (a C++ compiler, or Triton for a GPU); None if nothing."""
    compiler = environment.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler, path=environment.get("PATH", "")) is None:
        return f"there is no C++ compiler {compiler}; install it, or name another one in CXX"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def why_not_captured(device: torch.device) -> str | None:
    """Returns the reason why ``device`` has no CUDA graphs; None if it has them."""
    if device.type != "cuda":
        return "graphs are CUDA's"
    try:
        CudaRuntime()
    except RuntimeError as error:
        return str(error)
    return None
