"""Counts for tests of memory: live tensors, their bytes, and the resident memory of the process."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Live:
    """Tensors that Python holds, and the bytes of the storage they lie in, each counted once."""

    tensors: int
    bytes: int


def live_tensors() -> Live:
    gc.collect()
    # Not isinstance, which asks proxies of other libraries for a class and may wake them up; nor torch's own stand-ins,
    # which have no memory; nor sparse ones, which have no storage of their own.
    tensors = [
        found for found in gc.get_objects() if type(found) in (Tensor, Parameter)
    ]
    tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
    }
    return Live(len(tensors), sum(storages.values()))


def resident_mib() -> float:
    """Resident MiB of this process, from /proc, which only Linux has; garbage is collected first."""
    return int(STATM.read_text().split()[1]) * 4096 / 2**20
