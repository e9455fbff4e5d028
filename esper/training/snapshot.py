"""Snapshots of one host and its fossils, with all that a rollback restores, and copies of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.core.site import Role, Site


@dataclass(frozen=True)
class ValidationRecord:
    """Validation of the committed network (fossils only) at one epoch, and of its host alone; accuracies pp."""

    loss: float
    committed: float
    all_off: float
    all_off_loss: float


class Restorable(Protocol):
    """A host in training whose seeds have roles, and that can be rolled back."""

    @property
    def epoch(self) -> int:
        """Number of epochs trained so far."""

    def network_tensors(self, slots: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields by name all that training writes of the host and of the seeds in ``slots``."""

    def assign(
        self,
        site: Site,
        role: Role,
        alpha: float,
        target: float,
        learning: bool,
    ) -> None:
        """Sets what the seed of ``site`` does from now on, see ``Site.assign``."""

    def remove(self, site: Site) -> None:
        """Removes the seed at ``site``."""

    def discard(self, kept: Collection[str], saved: Collection[str]) -> None:
        """Removes the seeds in slots other than ``kept``, gradients, and optimizer state that is not in ``saved``."""


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


class TensorCopies:
    """Copies of tensors by name, in memory that is filled again.

    Args:
        pinned: whether copies of a GPU's tensors lie in pinned CPU memory instead of beside the tensors. Copies of
            tensors on a CPU lie in ordinary memory either way.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.tensors: dict[str, Tensor] = {}
        self._written: torch.cuda.Event | None = None
        """Recorded after the last copy from a GPU into pinned memory, which the CPU must not read earlier."""

    def save(self, live: Iterable[tuple[str, Tensor]]) -> None:
        """Copies all of ``live``, in the order of the current stream; nothing waits for a GPU."""
        originals = dict(live)
        for name in self.tensors.keys() - originals.keys():
            del self.tensors[name]
        with torch.no_grad():
            for name, tensor in originals.items():
                copy = self.tensors.get(name)
                # Memory that fits is used again.
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = memory_like(tensor, tensor.device, self.pinned)
                    self.tensors[name] = copy
                copy.copy_(tensor, non_blocking=self.pinned)
        if self.pinned:
            self._note_written(originals.values())

    def _note_written(self, originals: Iterable[Tensor]) -> None:
        """Records the end of the copies on the current stream of the GPU that these tensors are on, if on any."""
        for tensor in originals:
            if tensor.is_cuda:
                self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._written.record(torch.cuda.current_stream(tensor.device))
                return

    def restore(self, live: Iterable[tuple[str, Tensor]]) -> None:
        """Copies them back, in the order of the current stream; nothing waits. Raises KeyError for an unsaved name."""
        fill(live, self.tensors)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns copies on the CPU; waits until they are there."""
        if self._written is not None:
            self._written.synchronize()
        return {name: cpu_copy(tensor) for name, tensor in self.tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Takes over ``state``, CPU tensors by name, as copies of tensors on ``device``."""
        self._written = None
        self.tensors = {}
        for name, saved in state.items():
            memory = memory_like(saved, device, self.pinned)
            self.tensors[name] = memory.copy_(saved)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def place(self) -> str:
        """``cpu``, ``cuda:0``, ... or ``pinned``."""
        first = next(iter(self.tensors.values()), None)
        if first is None:
            return "cpu"
        if first.device.type == "cpu" and first.is_pinned():
            return "pinned"
        return str(first.device)


class Snapshot:
    """Copies of host, buffers, fossils and their momentum.

    Every tensor is copied every time: momentum, and everything in a captured step, is written without raising
    ``_version``, so nothing tells cheaply which tensors have changed, and in training hosts all of them do.

    Args:
        pinned: as for TensorCopies.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.copies = TensorCopies(pinned)
        self.epoch = -1
        self.measured: dict[str, dict[str, float]] = {}
        """Measurements of each fossil by name, kept for the caller."""
        self.record = ValidationRecord(0.0, 0.0, 0.0, 0.0)

    def save(
        self,
        training: Restorable,
        record: ValidationRecord,
        measured: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Copies the present state of the host and of the fossils that ``measured`` names, over the earlier one."""
        self.epoch = training.epoch
        self.record = record
        self.measured = _copied(measured)
        self.copies.save(training.network_tensors(self.measured))

    def take_over(self, other: Snapshot) -> None:
        """Becomes a copy of ``other``, which may then be overwritten."""
        self.epoch = other.epoch
        self.record = other.record
        self.measured = other.measured
        self.copies.save(other.copies.tensors.items())

    def restore(self, training: Restorable) -> None:
        """Restores host and fossils bit for bit, and removes every other seed.

        Clocks, schedules and generators do not rewind. The scale of losses in float16 is as at first.
        """
        training.discard(self.measured, self.copies.tensors)
        self.copies.restore(training.network_tensors(self.measured))

    def state_dict(self) -> dict[str, Any]:
        """Returns the snapshot as plain values and CPU tensors; copies."""
        return {
            "epoch": self.epoch,
            "record": asdict(self.record),
            "measured": _copied(self.measured),
            "copies": self.copies.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Becomes the snapshot of ``state``, for a host on ``device``."""
        self.epoch = state["epoch"]
        self.measured = _copied(state["measured"])
        self.record = ValidationRecord(**state["record"])
        self.copies.load_state_dict(state["copies"], device)


def _copied(measured: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {name: dict(values) for name, values in measured.items()}
