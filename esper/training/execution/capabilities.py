"""Capabilities of the devices and the driver of this machine: tiers, number formats, driver, cuBLAS's workspaces."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import MutableMapping

import torch

from esper._runtime import CudaRuntime
from esper.training.precision import multiplies_bfloat16

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Read by PyTorch and by cuBLAS: ``:SIZE:COUNT``, repeatable, for COUNT pieces of SIZE KiB."""

WORKSPACE_SETTING = ":4096:2:16:8"
"""8.125 MiB, PyTorch's own default before compute capability 9."""


def device_capabilities() -> dict[str, str]:
    """Describes each device of this machine by its name, without trying anything: the CPU, then the GPUs.

    The description has its tiers, the reasons why it lacks others, and its automatic number format. A host may still
    fail to compile or to be captured.
    """
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return {str(device): _capabilities_of(device) for device in devices}


def _capabilities_of(device: torch.device) -> str:
    reasons = {
        "compiled": _why_not_compiled(device),
        "graph": _why_not_captured(device),
    }
    tiers = ["eager", "native"] if device.type == "cpu" else ["eager"]
    missing = ""
    for tier, reason in reasons.items():
        if reason is None:
            tiers.append(tier)
        else:
            missing += f"; no {tier}: {reason}"
    precision = "bfloat16" if multiplies_bfloat16(device) else "float32, it has no instructions for bfloat16"
    return f"steps {', '.join(tiers)}{missing}; auto precision is {precision}"


def _why_not_compiled(device: torch.device) -> str | None:
    """Names what torch.compile lacks: a C++ compiler, or Triton for a GPU; None if nothing."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX") or usual
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler}; install it, or name another one in CXX"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def _why_not_captured(device: torch.device) -> str | None:
    """Returns the reason why ``device`` has no CUDA graphs; None if it has them."""
    if device.type != "cuda":
        return "graphs are CUDA's"
    try:
        CudaRuntime()
    except RuntimeError as error:
        return str(error)
    return None


def driver_version() -> str | None:
    """Returns the newest CUDA version that the driver supports, such as 12.1; None without driver or runtime."""
    try:
        version = CudaRuntime().driver_version()  # 12010 for 12.1
    except RuntimeError:
        return None
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


def bound_workspaces(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the size of cuBLAS's workspaces unless the user has; takes effect only before the process first uses cuBLAS.

    PyTorch allocates a workspace per thread and stream, so one per stream of a GPU. By PyTorch's sources it has 32 MiB
    on GPUs of compute capability 9 and 8.125 MiB on older ones, so 40 streams of an H100 would hold 1.25 GiB. A run
    sets the smaller size for any number of streams, because cuBLAS may choose another algorithm in a smaller workspace,
    and then rounds differently.
    """
    environment.setdefault(WORKSPACE_VARIABLE, WORKSPACE_SETTING)


def workspace_setting() -> str:
    """Returns the setting of the workspace of each stream of a run on a GPU, on which rounding may depend."""
    return f"{WORKSPACE_VARIABLE}={os.environ.get(WORKSPACE_VARIABLE, WORKSPACE_SETTING)}"
