"""What an env consists of that training changes: its tensors and generators by stable names, and copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from esper.training.env_state import ParallelEnvState


def network_tensors(env: ParallelEnvState, slots: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the host and of the seeds in ``slots``, with their optimizers' momentum."""
    slots = tuple(slots)
    yield from _tensors("host", env.host)
    for slot in slots:
        seed = env.slot_by_name[slot].seed
        assert seed is not None
        yield from _tensors(slot, seed)
    for group in (env.host_group, *(env.seed_groups[slot] for slot in slots)):
        for index, parameter in enumerate(group.parameters):
            momentum = group.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                yield f"{group.name}.momentum.{index}", momentum


def all_tensors(env: ParallelEnvState) -> Iterator[tuple[str, Tensor]]:
    """Whatever training writes and later epochs read: networks, whether a seed is still finite, buffers of shadows."""
    yield from network_tensors(env, (slot.name for slot in env.slots if slot.seed is not None))
    for slot in env.slots:
        if slot.finite is not None:
            yield f"{slot.name} is finite", slot.finite
    for name, shadow in env.shadows.items():
        for index, buffer in enumerate(shadow.tensors()):
            yield f"{name}.shadow.{index}", buffer


def all_generators(env: ParallelEnvState) -> dict[str, torch.Generator]:
    """Those that are drawn from again; that of a removed seed is not."""
    return {"order": env.order, "dropout": env.dropout} | {
        f"{name}.shadow": generator
        for name, generator in env.shadow_dropout.items()
        if env.slot_by_name[name].seed is not None
    }


class Copies:
    """Copies of tensors, in storage that is filled again."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def capture(self, live: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all of ``live``, by name, where they lie; nothing waits for a GPU."""
        found = dict(live)
        for name in [name for name in self.tensors if name not in found]:
            del self.tensors[name]
        with torch.no_grad():
            for name, tensor in found.items():
                kept = self.tensors.get(name)
                if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
                    kept.copy_(tensor)
                else:
                    self.tensors[name] = tensor.detach().clone()

    def restore(self, live: Iterable[tuple[str, Tensor]]) -> None:
        """Put the copies into the tensors of these names."""
        fill(live, self.tensors)


def fill(live: Iterable[tuple[str, Tensor]], saved: Mapping[str, Tensor]) -> None:
    """Write ``saved`` into the tensors of the same names, in place. Raises KeyError for one that was not saved."""
    with torch.no_grad():
        for name, tensor in live:
            tensor.copy_(saved[name])


def _tensors(owner: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each once however often it is used, and buffers, those that a state dict leaves out too."""
    for name, parameter in module.named_parameters():
        yield f"{owner}.{name}", parameter
    for name, buffer in module.named_buffers():
        yield f"{owner}.{name}", buffer
