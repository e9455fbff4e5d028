"""Memory that cuBLAS works in, bounded over the lanes of a GPU.

PyTorch gives cuBLAS a workspace for each thread and stream, and every lane is a stream. Up to version 2.14 that one
stays; 2.15 allocates one for each operation, out of memory that stays with the stream. By PyTorch's sources a workspace
has 32 MiB on GPUs of compute capability 9 (newer versions: 9 to 12) and 8.125 MiB on others: 1.25 GiB for 40 lanes.

cuBLAS may choose another algorithm in a smaller workspace, and so round differently. So the size is fixed before cuBLAS
is first used, stays for the life of the process, and is part of what a run reports.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from esper.config import TrainingConfig

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Read by PyTorch and by cuBLAS: ``:SIZE:COUNT`` for COUNT pieces of SIZE KiB, several one after the other."""

TOTAL = 512 * 2**20
"""Bytes that the workspaces of the lanes of one GPU may have together."""

DEFAULT = 32 * 2**20
"""Bytes of a workspace if nothing is set, at most."""

SETTINGS = (":4096:2:16:8", ":2048:1", ":1024:1")
"""Smaller ones: PyTorch's default before compute capability 9, then less. The last is what cublasLt asks for."""


@dataclass(frozen=True)
class Workspace:
    """What each lane on a GPU has."""

    size: int
    """Bytes, at most."""
    origin: str
    """Who chose it."""

    def __str__(self) -> str:
        return f"up to {self.size / 2**20:.4g} MiB a lane ({self.origin})"


def size_of(setting: str) -> int:
    """Bytes of a workspace with that setting, as PyTorch reads it; a setting that it cannot read means its default."""
    pieces = re.findall(r":([0-9]+):([0-9]+)", setting)
    return sum(int(size) * 1024 * int(count) for size, count in pieces) if pieces else DEFAULT


def setting_for(lanes: int) -> str | None:
    """The largest setting with which ``lanes`` workspaces stay within TOTAL, or the smallest. None is PyTorch's own."""
    if lanes * DEFAULT <= TOTAL:
        return None
    return next((setting for setting in SETTINGS if lanes * size_of(setting) <= TOTAL), SETTINGS[-1])


def lanes_of(config: TrainingConfig, devices: int) -> int:
    """Max lanes of a device: hosts that grow, and those of the baseline, which have streams of their own."""
    hosts = -(-int(config.env.n_envs or 1) // devices)
    return hosts + -(-config.env.baseline_episodes // devices)


class Workspaces:
    """The process's setting. One that the user has made stays. So does what the first run in the process chose: some
    versions of PyTorch read it at every call, and would use a small workspace as if it had the size of a later setting.

    Args:
        environment: where the setting is made.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        self.environment = environment
        self._chosen: str | None = None
        self._decided = False

    def bound(self, lanes: int) -> None:
        """Choose for a run with ``lanes`` lanes on a GPU, before it uses cuBLAS."""
        if self._decided:
            return
        self._decided = True
        if VARIABLE not in self.environment:
            self._chosen = setting_for(lanes)
            if self._chosen is not None:
                self.environment[VARIABLE] = self._chosen

    @property
    def workspace(self) -> Workspace:
        """What lanes have now."""
        setting = self.environment.get(VARIABLE)
        if setting is None:
            return Workspace(DEFAULT, "PyTorch's default")
        return Workspace(size_of(setting), f"{VARIABLE}={setting}{', set by Esper' if setting == self._chosen else ''}")


WORKSPACES = Workspaces()
"""Of this process."""


def of_run(device: str) -> str | None:
    """What each lane of a run on ``run.device`` has, for people; None on a CPU."""
    return str(WORKSPACES.workspace) if "cuda" in device else None


def describe(cuda: Any = torch.version.cuda) -> str | None:
    """For people: what lanes have, and what bounds it; None for a PyTorch without CUDA."""
    if cuda is None:
        return None
    return f"{WORKSPACES.workspace}; smaller with more than {TOTAL // DEFAULT} lanes, for {TOTAL // 2**20} MiB in all"
