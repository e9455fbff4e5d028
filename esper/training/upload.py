"""Copies of small tensors from the CPU to the device."""

from __future__ import annotations

from torch import Tensor


def upload(values: Tensor, into: Tensor) -> None:
    """Copies ``values`` from pageable CPU memory on the current stream without waiting.

    The caller may free or change ``values`` afterwards: CUDA has read pageable memory when the call returns.
    """
    into.copy_(values, non_blocking=into.device.type == "cuda")
