"""CPU twins: the same memory as a tensor of the CPU, and the same random numbers from a generator of the CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

WORD = 2**63


class NotModelledError(NotImplementedError):
    """The rehearsal has no twin for this."""


@lru_cache(maxsize=16384)
def _base(address: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    """All of an allocation as a tensor of the CPU, [elements]."""
    buffer = (ctypes.c_char * nbytes).from_address(address)
    with torch.inference_mode(False):
        return torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize)


def on_cpu(tensor: Tensor) -> Tensor:
    """A CPU tensor in the memory of a CUDA tensor, which it knows by the address and does not keep."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    base = _base(storage.data_ptr(), nbytes, tensor.dtype)
    return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def addresses_of(tensors: list[Tensor]) -> list[int]:
    """Addresses of CUDA tensors; those without memory are left out."""
    found = (tensor.untyped_storage().data_ptr() for tensor in tensors)
    return [address for address in found if address != 0]


@dataclass(frozen=True)
class Philox:
    """A place in the sequence of a CUDA generator, from where an operator draws."""

    generator: torch.Generator
    seed: int
    offset: int

    @classmethod
    def of(cls, leaves: list[Any], device: int) -> Philox:
        """The place from which an operator with these arguments will draw."""
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        generator = given[0] if given else torch.cuda.default_generators[device]
        return cls(generator, generator.initial_seed(), generator.get_offset())

    @property
    def moved(self) -> bool:
        """Whether the operator drew anything."""
        return self.generator.get_offset() != self.offset

    def twin(self) -> torch.Generator:
        """A fresh generator of the CPU; equal places give equal numbers."""
        mixed = (
            self.seed * 0x9E3779B97F4A7C15 + self.offset * 0xBF58476D1CE4E5B9
        ) % WORD
        return torch.Generator().manual_seed(mixed)


def call_with_draws(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    draws: Philox,
) -> Any:
    """Call ``func`` on the CPU with the twin of its generator. Raises NotModelledError if it takes no generator."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func(*args, **{**kwargs, "generator": draws.twin()})
    if "generator" in func.overloadpacket.overloads():
        return func.overloadpacket.generator(
            *args, **{**kwargs, "generator": draws.twin()}
        )
    if func is torch.ops.aten.native_dropout.default:
        x, p, _train = args
        kept = torch.empty(x.shape, dtype=x.dtype).bernoulli_(
            1 - p, generator=draws.twin()
        )
        return x * kept / (1 - p), kept.bool()
    raise NotModelledError(f"{func} draws from the process's generator")
