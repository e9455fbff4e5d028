"""Numbers that the CPU hands to the device."""

from __future__ import annotations

from torch import Tensor


def upload(values: Tensor, into: Tensor) -> None:
    """Copy ``values``, which lie in ordinary memory of the CPU, on the current stream, and do not wait for it: CUDA has
    taken over memory that is not pinned when the call returns."""
    into.copy_(values, non_blocking=into.device.type == "cuda")
