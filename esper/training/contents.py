"""What an env consists of that training changes: its tensors and generators by stable names, and copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from esper.training.host_training import HostTraining


def network_tensors(training: HostTraining, slots: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the host and of the seeds in ``slots``, with their optimizers' momentum."""
    slots = tuple(slots)
    yield from _tensors("host", training.host)
    for slot in slots:
        seed = training.site_by_name[slot].seed
        assert seed is not None
        yield from _tensors(slot, seed)
    for group in (training.host_group, *(training.seed_groups[slot] for slot in slots)):
        for index, parameter in enumerate(group.parameters):
            momentum = group.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                yield f"{group.name}.momentum.{index}", momentum


def all_tensors(training: HostTraining) -> Iterator[tuple[str, Tensor]]:
    """Whatever training writes and later epochs read: networks, whether a seed is still finite, buffers of shadows."""
    yield from network_tensors(training, (site.name for site in training.sites if site.seed is not None))
    for site in training.sites:
        if site.finite is not None:
            yield f"{site.name} is finite", site.finite
    for name, shadow in training.shadows.items():
        for index, buffer in enumerate(shadow.tensors()):
            yield f"{name}.shadow.{index}", buffer


def all_generators(training: HostTraining) -> dict[str, torch.Generator]:
    """Those that are drawn from again; that of a removed seed is not."""
    return {"order": training.order, "dropout": training.dropout} | {
        f"{name}.shadow": generator
        for name, generator in training.shadow_dropout.items()
        if training.site_by_name[name].seed is not None
    }


class TensorSnapshot:
    """Copies of tensors, in storage that is filled again.

    Args:
        pinned: whether copies of a GPU's tensors lie in pinned CPU memory, and not beside the tensors. Copies of
            tensors on a CPU lie in ordinary memory either way.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.tensors: dict[str, Tensor] = {}
        self._written: torch.cuda.Event | None = None
        """After the last copy from a GPU into pinned memory, which the CPU must not read before."""

    def capture(self, live: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all of ``live``, by name, in the order of the current stream; nothing waits for a GPU."""
        found = dict(live)
        for name in [name for name in self.tensors if name not in found]:
            del self.tensors[name]
        with torch.no_grad():
            for name, tensor in found.items():
                kept = self.tensors.get(name)
                if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                    kept = self.tensors[name] = self._storage_like(tensor, tensor.device)
                kept.copy_(tensor, non_blocking=self.pinned)
        device = next((tensor.device for tensor in found.values() if tensor.is_cuda), None) if self.pinned else None
        if device is not None:
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(device))

    def restore(self, live: Iterable[tuple[str, Tensor]]) -> None:
        """Put the copies into the tensors of these names, in the order of the current stream; nothing waits."""
        fill(live, self.tensors, non_blocking=self.pinned)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the copies, on the CPU; waits until they are there."""
        if self._written is not None:
            self._written.synchronize()
        return {name: copy.cpu().clone() for name, copy in self.tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Become copies of ``state``, CPU tensors by name, for tensors on ``device``."""
        self._written = None
        self.tensors = {name: self._storage_like(tensor, device).copy_(tensor) for name, tensor in state.items()}

    @property
    def bytes(self) -> int:
        """Of all copies."""
        return sum(copy.nbytes for copy in self.tensors.values())

    @property
    def place(self) -> str:
        """Where they lie: ``cpu``, ``cuda:0``, ... or ``pinned``."""
        first = next(iter(self.tensors.values()), None)
        if first is None:
            return "cpu"
        return "pinned" if first.device.type == "cpu" and first.is_pinned() else str(first.device)

    def _storage_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Memory with the shape, dtype and strides of ``tensor``, for a copy of one on ``device``."""
        if self.pinned and device.type == "cuda":
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
        return torch.empty_like(tensor, device=device)


def fill(live: Iterable[tuple[str, Tensor]], saved: Mapping[str, Tensor], non_blocking: bool = False) -> None:
    """Write ``saved`` into the tensors of the same names, in place; with ``non_blocking`` in the order of the current
    stream, without a wait for pinned memory. Raises KeyError for one that was not saved."""
    with torch.no_grad():
        for name, tensor in live:
            tensor.copy_(saved[name], non_blocking=non_blocking)


def _tensors(owner: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each once however often it is used, and buffers, those that a state dict leaves out too."""
    for name, parameter in module.named_parameters():
        yield f"{owner}.{name}", parameter
    for name, buffer in module.named_buffers():
        yield f"{owner}.{name}", buffer
