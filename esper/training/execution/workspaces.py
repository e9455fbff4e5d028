"""The size of cuBLAS's workspaces, of which PyTorch allocates one per thread and stream, so one per stream of a GPU.

By PyTorch's sources a workspace has 32 MiB on GPUs of compute capability 9 and 8.125 MiB on older ones, so 40 streams
of an H100 would hold 1.25 GiB. A run sets the smaller size for any number of streams, because cuBLAS may choose another
algorithm in a smaller workspace, and then rounds differently.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

import torch

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Read by PyTorch and by cuBLAS: ``:SIZE:COUNT``, repeatable, for COUNT pieces of SIZE KiB."""

SETTING = ":4096:2:16:8"
"""8.125 MiB, PyTorch's own default before compute capability 9."""

DEFAULT = 32 * 2**20
"""Max bytes of a workspace if nothing is set."""


def bound(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the size unless the user has; takes effect only before the process first uses cuBLAS."""
    environment.setdefault(VARIABLE, SETTING)


def size_of(setting: str) -> int:
    """Returns the bytes of a workspace under a setting, as PyTorch reads it; its default if it cannot be read."""
    pieces = re.findall(r":([0-9]+):([0-9]+)", setting)
    if not pieces:
        return DEFAULT
    return sum(int(size) * 1024 * int(count) for size, count in pieces)


def of_run(device: str, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Describes the workspace of each stream of a run on ``run.device``; None on a CPU."""
    if all(torch.device(name.strip()).type != "cuda" for name in device.split(",")):
        return None
    setting = environment.get(VARIABLE, "")
    origin = f"{VARIABLE}={setting}" if VARIABLE in environment else "PyTorch's default"
    return f"up to {size_of(setting) / 2**20:.4g} MiB per stream ({origin})"


def describe(cuda: str | None = torch.version.cuda) -> str | None:
    """Describes the workspace of each stream of a run on this machine; None if PyTorch has no CUDA."""
    if cuda is None:
        return None
    setting = os.environ.get(VARIABLE, SETTING)
    return of_run("cuda", {VARIABLE: setting})
