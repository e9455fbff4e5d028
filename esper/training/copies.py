"""Copies of tensors, on their device, on the CPU or in pinned memory, and back into the tensors that steps refer to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def fill(live: Iterable[tuple[str, Tensor]], saved: Mapping[str, Tensor]) -> None:
    """Copies ``saved`` into the tensors of the same names, in the order of the current stream.

    Nothing waits for a GPU. Raises KeyError for a name that was not saved.
    """
    with torch.no_grad():
        for name, tensor in live:
            tensor.copy_(saved[name], non_blocking=tensor.is_cuda)


def memory_like(tensor: Tensor, device: torch.device, pinned: bool) -> Tensor:
    """Returns memory with the shape, dtype and strides of ``tensor`` for a copy of a tensor on ``device``.

    It lies there, or with ``pinned`` in pinned CPU memory if the device is a GPU.
    """
    if pinned and device.type == "cuda":
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device=device)


def cpu_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def pinned_copy(tensor: Tensor) -> Tensor:
    """Returns a copy of a GPU's tensor in pinned CPU memory, made in the order of the current stream.

    It is to be read on that stream. The copy of a tensor on a CPU lies in ordinary memory.
    """
    memory = memory_like(tensor, tensor.device, pinned=True)
    return memory.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
