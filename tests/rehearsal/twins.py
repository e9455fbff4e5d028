"""CPU twins: the same memory as a tensor of the CPU, and the same random numbers from a generator of the CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tests.rehearsal import fake_runtime

WORD = 2**63


class NotModelledError(NotImplementedError):
    """The rehearsal has no twin for this."""


@lru_cache(maxsize=8192)
def _storage_at(address: int, nbytes: int) -> torch.UntypedStorage:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    buffer = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def on_cpu(tensor: Tensor) -> Tensor:
    """A CPU tensor in the memory of a CUDA tensor, which it knows by the address and does not keep."""
    storage = tensor.untyped_storage()
    with torch.inference_mode(False), torch.no_grad():
        twin = torch.empty(0, dtype=tensor.dtype)
        twin.set_(
            _storage_at(storage.data_ptr(), storage.nbytes()), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    return twin


@dataclass(frozen=True)
class Memory:
    """Memory that a twin will touch, to see that it is not freed before."""

    address: int
    serial: int

    def check(self) -> None:
        """Raise RuntimeError if the memory was freed."""
        if fake_runtime.block(self.address)[0] != self.serial:
            raise RuntimeError("reads or writes memory of the device that has been freed")


def memory_of(tensors: list[Tensor], device: int | None) -> list[Memory]:
    """The memory of CUDA tensors, all on ``device`` if it is given. Raises RuntimeError for any other memory."""
    found = []
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if address == 0:
            continue
        serial, place = fake_runtime.block(address)
        if serial == 0:
            raise RuntimeError("a CUDA tensor lies in memory that no device has")
        if device is not None and place != device:
            raise RuntimeError(f"an operator on GPU {device} is given memory of GPU {place}")
        found.append(Memory(address, serial))
    return found


@dataclass(frozen=True)
class Philox:
    """A place in the sequence of a CUDA generator, from where an operator draws."""

    generator: torch.Generator
    seed: int
    offset: int

    @classmethod
    def of(cls, func: torch._ops.OpOverload, leaves: list[Any], device: int, capturing: bool) -> Philox | None:
        """Where ``func`` will draw from; None if it does not draw. Raises NotModelledError in a capture."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        if capturing:
            raise NotModelledError(f"{func} draws in a capture")
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        generator = given[0] if given else torch.cuda.default_generators[device]
        return cls(generator, generator.initial_seed(), generator.get_offset())

    @property
    def moved(self) -> bool:
        """Whether the operator drew anything."""
        return self.generator.get_offset() != self.offset

    def twin(self) -> torch.Generator:
        """A fresh generator of the CPU; equal places give equal numbers."""
        mixed = (self.seed * 0x9E3779B97F4A7C15 + self.offset * 0xBF58476D1CE4E5B9) % WORD
        return torch.Generator().manual_seed(mixed)


def call_with_draws(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], draws: Philox) -> Any:
    """Call ``func`` on the CPU with the twin of its generator. Raises NotModelledError if it takes no generator."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func(*args, **{**kwargs, "generator": draws.twin()})
    if "generator" in func.overloadpacket.overloads():
        return func.overloadpacket.generator(*args, **{**kwargs, "generator": draws.twin()})
    if func is torch.ops.aten.native_dropout.default:
        x, p, _train = args
        kept = torch.empty(x.shape, dtype=x.dtype).bernoulli_(1 - p, generator=draws.twin())
        return x * kept / (1 - p), kept.bool()
    raise NotModelledError(f"{func} draws from the process's generator")
