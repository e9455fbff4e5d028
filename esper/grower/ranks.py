"""The model of a loop without its wrappers, and what ranks that train it share to grow the same network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.config import ConfigError

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
        for parameter in parameters:
            kind = (parameter.device, parameter.dtype)
            alike.setdefault(kind, []).append(parameter)
        for group in alike.values():
            self._average(group)

    def _average(self, parameters: list[Tensor]) -> None:
        """Averages the gradients of parameters of one device and dtype, in one message."""
        present = []
        parts = []
        for parameter in parameters:
            present.append(parameter.grad is not None)
            gradient = parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad.to_dense()
            parts.append(gradient.flatten())
        parts.append(parameters[0].new_tensor(present))
        flat = torch.cat(parts)
        dist.all_reduce(flat)
        *sums, counts = torch.split(flat, list(map(torch.numel, parts)))
        nowhere = [False] * len(parameters)
        # Reading the counts waits for the device, so only a rank that lacks a gradient does.
        if not all(present):
            nowhere = (counts == 0).tolist()
        for parameter, total, none in zip(parameters, sums, nowhere, strict=True):
            parameter.grad = None if none else (total / dist.get_world_size()).view_as(parameter)

    def largest(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the element-wise maximum over the ranks of ``values`` [n]."""
        if not self.parallel:
            return values
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, values)
        largest: NDArray[np.float64] = np.max(gathered, axis=0)
        return largest

    def of_first(self, value: T) -> T:
        """Returns the value that rank 0 has."""
        if not self.parallel:
            return value
        shared = [value]
        dist.broadcast_object_list(shared)
        return shared[0]

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors by those of rank 0."""
        if not self.parallel:
            return
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def plain_model(model: nn.Module) -> tuple[nn.Module, Ranks]:
    """Returns the network inside ``DistributedDataParallel``, or ``model``, and the ranks that train it.

    Raises ConfigError for a compiled model: seeds that come and go would recompile it at every change.
    """
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ConfigError(
            "the model is compiled, and every change of a seed would compile it again: pass the model itself, and "
            "compile what grower.finish() returns"
        )
    if isinstance(model, nn.DataParallel):
        raise ConfigError("nn.DataParallel copies the model for each pass; use DistributedDataParallel")
    if is_sharded(model):
        raise ConfigError("the model's parameters are split over ranks, and seeds are not; use DistributedDataParallel")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module, Ranks(parallel=True)
    return model, Ranks(parallel=False)
