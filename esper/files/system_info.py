"""Environment of a run: versions, hardware, and which compiled modules were available."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from esper import __version__, _runtime
from esper.config import ConfigError
from esper.ops import _native
from esper.training.execution import capabilities, workspaces
from esper.training.execution.cores import usable_cores
from esper.training.execution.multi_gpu import chosen_devices

PACKAGES = ("torch", "numpy", "gymnasium", "scipy", "scikit-learn", "pydantic", "safetensors")

ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains the package."""


def describe_environment() -> dict[str, Any]:
    """Returns versions, hardware and compiled modules, ready for JSON."""
    driver = capabilities.driver_version()
    return {
        "python": platform.python_version(),
        "packages": {"esper": __version__, **{name: metadata.version(name) for name in PACKAGES}},
        "source": source(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "instruction_sets": [name for name, there in sorted(_runtime.cpu_features().items()) if there],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "cuda": torch.version.cuda,
        "driver": None if driver is None else f"CUDA {capabilities.version_text(driver)}",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "gpus_lack": {
            f"cuda:{i}": lack
            for i in range(torch.cuda.device_count())
            if (lack := capabilities.what_kernels_lack(driver, torch.cuda.get_device_capability(i))) is not None
        },
        "cublas_workspace": workspaces.describe(),
        "steps": capabilities.device_capabilities(),
        "modules": {m.name: str(m.path) if m.loaded else f"missing: {m.reason}" for m in _native.modules()},
        "built_with": _native.built_with(),
        "native_required": _native.native_required(),
    }


def summary_lines(paths: bool = True) -> list[str]:
    """Formats the same for display; with ``paths``, shows the path of each compiled module instead of "loaded"."""
    facts = describe_environment()
    modules = facts["modules"]
    if not paths:
        modules = {name: where if where.startswith("missing") else "loaded" for name, where in modules.items()}
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    hardware = f"{facts['cpu']}, {facts['cores']} core{'' if facts['cores'] == 1 else 's'}, {facts['memory_gib']} GiB"
    return [
        f"Python {facts['python']}; {packages}",
        f"{hardware}; {', '.join(facts['instruction_sets']) or platform.machine()}",
        f"CUDA {facts['cuda'] or 'not supported by this torch'}; driver: {facts['driver'] or 'none'}; "
        f"GPUs: {', '.join(facts['gpus']) or 'none'}",
        *(f"  {gpu:14s} {lack}" for gpu, lack in facts["gpus_lack"].items()),
        *([f"cuBLAS workspaces: {facts['cublas_workspace']}"] if facts["cublas_workspace"] else []),
        *(f"  {device:14s} {offer}" for device, offer in facts["steps"].items()),
        f"Built with: {facts['built_with']}",
        *(f"  {name:14s} {where}" for name, where in modules.items()),
        f"Fallbacks are {'errors' if facts['native_required'] else 'allowed'} "
        f"({_native.VARIABLE} is {'1' if facts['native_required'] else 'not 1'})",
    ]


def source(folder: Path = ROOT) -> dict[str, Any] | None:
    """Returns the ``commit`` of the checkout that ``folder`` is, and whether tracked files differ from it (``dirty``).

    None if it is no checkout, as after an installation from a wheel, or if git cannot be run.
    """
    if not (folder / ".git").exists():
        return None
    git = ("git", "--no-optional-locks", "-C", str(folder))  # others may be working there
    try:
        commit = subprocess.run((*git, "rev-parse", "HEAD"), capture_output=True, text=True, check=True, timeout=10)
        changes = subprocess.run(
            (*git, "status", "--porcelain", "--untracked-files=no"), capture_output=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(changes.stdout)}


def cpu_name() -> str:
    """Returns the processor's name as reported by the system."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def check_devices(names: str) -> tuple[torch.device, ...]:
    """Returns the devices in a comma-separated list, or those that ``auto`` stands for.

    Raises:
        ConfigError: a device cannot be used (see :func:`check_device`), or several are given that are not distinct
            GPUs.
    """
    devices = tuple(check_device(name.strip()) for name in chosen_devices(names).split(","))
    numbers = {device.index or 0 for device in devices}
    if len(devices) > 1 and (any(device.type != "cuda" for device in devices) or len(numbers) < len(devices)):
        raise ConfigError(f"run.device is {names!r}: several devices must be distinct GPUs, such as cuda:0,cuda:1")
    return devices


def check_device(name: str) -> torch.device:
    """Returns the device called ``name``. Raises ConfigError listing this machine's devices if it cannot be used."""
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; this machine has: {', '.join(there)}") from None
    known = {torch.device(known) for known in there} | ({torch.device("cuda")} if len(there) > 1 else set())
    if device not in known:
        raise ConfigError(f"device {name!r} is not available; this machine has: {', '.join(there)}")
    return device
