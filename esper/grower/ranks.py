"""State that the ranks of a data-parallel loop share, so that all of them grow the same network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

T = TypeVar("T")


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP, of either version, has split the model's parameters over ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # takes seconds to import

    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())


class Ranks:
    """The default process group if ``parallel``, one rank alone otherwise.

    Seeds are not parameters of the wrapped model, so their gradients are averaged here.
    """

    def __init__(self, parallel: bool) -> None:
        self.parallel = parallel
        self.first = not parallel or dist.get_rank() == 0
        """Whether this is rank 0."""

    def average(self, parameters: Sequence[Tensor]) -> None:
        """Averages the gradients of ``parameters`` over the ranks, in place.

        A rank without a gradient, such as one that dropped the branch of a seed, counts as zeros and gets the average.
        Where no rank has one, there is none.
        """
        if not self.parallel:
            return
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in parameters:
            alike.setdefault((p.device, p.dtype), []).append(p)
        for group in alike.values():
            self._average(group)

    def _average(self, parameters: list[Tensor]) -> None:
        """Averages the gradients of parameters of one device and dtype, in one message."""
        gradients = [p.new_zeros(p.shape) if p.grad is None else p.grad.to_dense() for p in parameters]
        missing = [p.grad is None for p in parameters]
        there = parameters[0].new_tensor([not absent for absent in missing])
        flat = torch.cat([*(g.flatten() for g in gradients), there])
        dist.all_reduce(flat)
        *sums, counts = torch.split(flat, [*(g.numel() for g in gradients), len(parameters)])
        # Reading the counts waits for the device, so only a rank that lacks a gradient does.
        nowhere = (counts == 0).tolist() if any(missing) else missing
        for p, total, none in zip(parameters, sums, nowhere, strict=True):
            p.grad = None if none else (total / dist.get_world_size()).view_as(p)

    def largest(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the element-wise maximum over the ranks of ``values`` [n]."""
        if self.parallel:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, values)
            values = np.max(gathered, axis=0)
        return values

    def of_first(self, value: T) -> T:
        """Returns the value that rank 0 has."""
        if not self.parallel:
            return value
        shared = [value]
        dist.broadcast_object_list(shared)
        return shared[0]

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors by those of rank 0."""
        for tensor in tensors if self.parallel else ():
            dist.broadcast(tensor, 0)
