"""Environment of a run: versions, hardware, and which compiled modules were available."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from esper import __version__, _runtime
from esper.config import ConfigError
from esper.ops import _native
from esper.telemetry.text import count
from esper.training.execution import capabilities
from esper.training.execution.cores import usable_cores
from esper.training.execution.multi_gpu import chosen_devices

PACKAGES = ("torch", "numpy", "gymnasium", "scipy", "scikit-learn", "pydantic", "safetensors")

ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains the package."""


def describe_environment() -> dict[str, Any]:
    """Returns versions, hardware and compiled modules, ready for JSON."""
    modules = {}
    for module in _native.modules():
        modules[module.name] = str(module.path) if module.loaded else f"missing: {module.reason}"
    driver = capabilities.driver_version()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "python": platform.python_version(),
        "packages": versions().copy(),
        "source": source(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "instruction_sets": sorted(name for name, usable in _runtime.cpu_features().items() if usable),
        "memory_gib": round(memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "driver": None if driver is None else f"CUDA {driver}",
        "gpus": list(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
        "cublas_workspace": capabilities.workspace_setting() if torch.version.cuda else None,
        "steps": capabilities.device_capabilities(),
        "modules": modules,
        "built_with": _native.built_with(),
        "native_required": _native.native_required(),
    }


@cache
def versions() -> dict[str, str]:
    """Returns the versions of Esper and of the packages that it computes with, which are searched for once."""
    packages = {"esper": __version__}
    for name in PACKAGES:
        packages[name] = metadata.version(name)
    return packages


def summary_lines(paths: bool = True) -> list[str]:
    """Formats the same for display; with ``paths``, shows the path of each compiled module instead of "loaded"."""
    facts = describe_environment()
    modules = facts["modules"]
    if not paths:
        for name, state in modules.items():
            if not state.startswith("missing"):
                modules[name] = "loaded"
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    hardware = f"{facts['cpu']}, {count(facts['cores'], 'core')}, {facts['memory_gib']} GiB"
    lines = [
        f"Python {facts['python']}; {packages}",
        f"{hardware}; {', '.join(facts['instruction_sets']) or platform.machine()}",
        f"CUDA {facts['cuda'] or 'not supported by this torch'}; driver: {facts['driver'] or 'none'}; "
        f"GPUs: {', '.join(facts['gpus']) or 'none'}",
    ]
    if facts["cublas_workspace"]:
        lines.append(f"cuBLAS workspaces: {facts['cublas_workspace']}")
    lines += _table(facts["steps"])
    lines.append(f"Built with: {facts['built_with']}")
    lines += _table(modules)
    if facts["native_required"]:
        lines.append(f"Fallbacks are errors ({_native.VARIABLE} is 1)")
    else:
        lines.append(f"Fallbacks are allowed ({_native.VARIABLE} is not 1)")
    return lines


def _table(rows: Mapping[str, str]) -> list[str]:
    return [f"  {name:14s} {words}" for name, words in rows.items()]


def source(folder: Path = ROOT) -> dict[str, Any] | None:
    """Returns the ``commit`` of the checkout that ``folder`` is, and whether tracked files differ from it (``dirty``).

    None if it is no checkout, as after an installation from a wheel, or if git cannot be run.
    """
    if not (folder / ".git").exists():
        return None
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.decode().strip(), "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> bytes:
    """Returns the output of a command of git that takes no locks, because others may be working in the folder."""
    command = ("git", "--no-optional-locks", "-C", str(folder), *arguments)
    return subprocess.run(command, capture_output=True, check=True, timeout=10).stdout


def cpu_name() -> str:
    """Returns the processor's name as reported by the system."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def check_devices(names: str) -> tuple[torch.device, ...]:
    """Returns the devices in a comma-separated list, or those that ``auto`` stands for.

    Raises:
        ConfigError: a device cannot be used (see :func:`check_device`), or several are given that are not distinct
            GPUs.
    """
    devices = tuple(check_device(name.strip()) for name in chosen_devices(names).split(","))
    if len(devices) == 1:
        return devices
    # A GPU without a number is the first one.
    numbers = {device.index or 0 for device in devices if device.type == "cuda"}
    if len(numbers) < len(devices):
        raise ConfigError(f"run.device is {names!r}: several devices must be distinct GPUs, such as cuda:0,cuda:1")
    return devices


def check_device(name: str) -> torch.device:
    """Returns the device called ``name``. Raises ConfigError listing this machine's devices if it cannot be used."""
    usable = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    names = ", ".join(usable)
    if len(usable) > 1:
        usable.append("cuda")  # the current GPU
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; this machine has: {names}") from None
    if device not in map(torch.device, usable):
        raise ConfigError(f"device {name!r} is not available; this machine has: {names}")
    return device
