"""Capabilities of the devices and the driver of this machine: tiers, number formats, kernels, cuBLAS's workspaces."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import MutableMapping

import torch

from esper._runtime import CudaRuntime
from esper.training.precision import multiplies_bfloat16

LARGE_ARGUMENTS = 12010
"""First CUDA version, as CUDA writes it (1000 · major + 10 · minor), whose kernels take 32,764 bytes of arguments;
earlier ones take 4,096."""

DRIVER = 530
"""First NVIDIA driver for that version."""

VOLTA = (7, 0)
"""First compute capability whose kernels can take 32,764 bytes."""

STATS_TENSORS = 128
"""Max tensors of gradient statistics (csrc/cuda/grad_stats.cu) whose table of pointers fits 4,096 bytes."""

STEP_TENSORS = 40
"""The same for steps of optimizers (sgd.cu, adamw.cu)."""

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Read by PyTorch and by cuBLAS: ``:SIZE:COUNT``, repeatable, for COUNT pieces of SIZE KiB."""

WORKSPACE_SETTING = ":4096:2:16:8"
"""8.125 MiB, PyTorch's own default before compute capability 9."""

WORKSPACE_BYTES = 32 * 2**20
"""Max bytes of a workspace if nothing is set."""


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
    tiers = ["eager"]
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


def driver_version() -> int | None:
    """Returns the newest CUDA version that the driver supports, as CUDA writes it; None without driver or runtime."""
    try:
        return CudaRuntime().driver_version() or None
    except RuntimeError:
        return None


def version_text(version: int) -> str:
    """Formats a version for people: 12010 is 12.1."""
    return f"{version // 1000}.{version % 1000 // 10}"


def what_kernels_lack(driver: int | None, capability: tuple[int, int]) -> str | None:
    """Names what kernels lack on a GPU with that compute capability and driver, and the remedy; None if nothing."""
    if driver is None:
        return None
    needs = (
        f"a step of more than {STEP_TENSORS} tensors, and gradient statistics of more than {STATS_TENSORS}, take "
        "kernel arguments of more than 4,096 bytes"
    )
    if capability < VOLTA:
        present = ".".join(map(str, capability))
        first = ".".join(map(str, VOLTA))
        return f"{needs}, which compute capability {present} does not have; it needs a GPU of {first} or newer"
    if driver < LARGE_ARGUMENTS:
        return (
            f"{needs}, which its driver does not have: it supports CUDA {version_text(driver)}, and CUDA "
            f"{version_text(LARGE_ARGUMENTS)} is needed; install NVIDIA driver {DRIVER} or newer"
        )
    return None


def bound_workspaces(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the size of cuBLAS's workspaces unless the user has; takes effect only before the process first uses cuBLAS.

    PyTorch allocates a workspace per thread and stream, so one per stream of a GPU. By PyTorch's sources it has 32 MiB
    on GPUs of compute capability 9 and 8.125 MiB on older ones, so 40 streams of an H100 would hold 1.25 GiB. A run
    sets the smaller size for any number of streams, because cuBLAS may choose another algorithm in a smaller workspace,
    and then rounds differently.
    """
    environment.setdefault(WORKSPACE_VARIABLE, WORKSPACE_SETTING)


def workspace_size(setting: str) -> int:
    """Returns the bytes of a workspace under a setting, as PyTorch reads it; its default if it cannot be read."""
    pieces = re.findall(r":([0-9]+):([0-9]+)", setting)
    if not pieces:
        return WORKSPACE_BYTES
    return sum(int(size) * 1024 * int(count) for size, count in pieces)


def run_workspace(device: str, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Describes the workspace of each stream of a run on ``run.device``; None on a CPU."""
    if all(torch.device(name.strip()).type != "cuda" for name in device.split(",")):
        return None
    setting = environment.get(WORKSPACE_VARIABLE, "")
    origin = f"{WORKSPACE_VARIABLE}={setting}" if WORKSPACE_VARIABLE in environment else "PyTorch's default"
    return f"up to {workspace_size(setting) / 2**20:.4g} MiB per stream ({origin})"


def describe_workspace(cuda: str | None = torch.version.cuda) -> str | None:
    """Describes the workspace of each stream of a run on this machine; None if PyTorch has no CUDA."""
    if cuda is None:
        return None
    setting = os.environ.get(WORKSPACE_VARIABLE, WORKSPACE_SETTING)
    return run_workspace("cuda", {WORKSPACE_VARIABLE: setting})
