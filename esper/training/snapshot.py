"""Snapshots of one host and its fossils, with all that a rollback restores, and copies of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.core.site import Role, Site

NOTHING: Mapping[str, list[float]] = MappingProxyType({})


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

    def layers(self) -> Any:
        """Returns what has grown in its layers, as plain values."""

    def discard(
        self,
        kept: Collection[str],
        saved: Mapping[str, Tensor],
        layers: Any,
    ) -> None:
        """Removes the seeds in slots other than ``kept``, gradients, and optimizer state that is not in ``saved``.

        The layers get the shapes that they have there, which are those of ``layers``.
        """


def fill(live: Iterable[tuple[str, Tensor]], saved: Mapping[str, Tensor]) -> None:
    """Copies ``saved`` into the tensors of the same names, in the order of the current stream.

    Nothing waits for a GPU. Raises KeyError for a name that was not saved, and ValueError for another shape.
    """
    with torch.no_grad():
        for name, tensor in live:
            if saved[name].shape != tensor.shape:  # copying would broadcast
                raise ValueError(f"{name} is {list(tensor.shape)}, but was saved as {list(saved[name].shape)}")
            tensor.copy_(saved[name], non_blocking=tensor.is_cuda)


def cpu_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class Snapshot:
    """Copies of host, buffers, fossils and their momentum, beside the tensors, in memory that is filled again.

    Every tensor is copied every time: momentum, and everything in a captured step, is written without raising
    ``_version``, so nothing tells cheaply which tensors have changed, and in training hosts all of them do.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """The copies by name."""
        self.epoch = -1
        self.measured: dict[str, dict[str, float]] = {}
        """Measurements of each fossil by name, kept for the caller."""
        self.record = ValidationRecord(0.0, 0.0, 0.0, 0.0)
        self.layers: Any = None
        """All that had grown in the layers."""
        self.grown: dict[str, list[float]] = {}
        """The same in the state of the slots, by field of ``esper.core.slots.GROWN``, kept for the caller."""

    def save(
        self,
        training: Restorable,
        record: ValidationRecord,
        measured: Mapping[str, Mapping[str, float]],
        grown: Mapping[str, list[float]] = NOTHING,
    ) -> None:
        """Copies the present state of the host and of the fossils that ``measured`` names, over the earlier one.

        The copies are made in the order of the current stream; nothing waits for a GPU.
        """
        self.epoch = training.epoch
        self.record = record
        self.measured = _copied(measured)
        self.layers = training.layers()
        self.grown = dict(grown)
        originals = dict(training.network_tensors(self.measured))
        for name in self.tensors.keys() - originals.keys():
            del self.tensors[name]
        with torch.no_grad():
            for name, tensor in originals.items():
                copy = self.tensors.get(name)
                # Memory that fits is used again.
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = torch.empty_like(tensor)
                    self.tensors[name] = copy
                copy.copy_(tensor)

    def restore(self, training: Restorable) -> None:
        """Restores host and fossils bit for bit, and removes every other seed.

        Clocks, schedules and generators do not rewind. The scale of losses in float16 is as at first.
        """
        training.discard(self.measured, self.tensors, self.layers)
        fill(training.network_tensors(self.measured), self.tensors)

    def held(self) -> Counter[str]:
        """Returns the bytes of the copies by place: ``cpu``, ``cuda:0``, ..."""
        total: Counter[str] = Counter()
        for tensor in self.tensors.values():
            total[str(tensor.device)] += tensor.nbytes
        return total

    def state_dict(self) -> dict[str, Any]:
        """Returns the snapshot as plain values and CPU tensors; copies."""
        return {
            "epoch": self.epoch,
            "record": asdict(self.record),
            "measured": _copied(self.measured),
            "layers": self.layers,
            "grown": dict(self.grown),
            "copies": {name: cpu_copy(tensor) for name, tensor in self.tensors.items()},
        }

    def load_state_dict(
        self,
        state: dict[str, Any],
        device: torch.device,
    ) -> None:
        """Becomes the snapshot of ``state``, for a host on ``device``."""
        self.epoch = state["epoch"]
        self.measured = _copied(state["measured"])
        self.record = ValidationRecord(**state["record"])
        self.layers = state["layers"]
        self.grown = state["grown"]
        self.tensors = {name: saved.to(device, copy=True) for name, saved in state["copies"].items()}


def _copied(measured: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {name: dict(values) for name, values in measured.items()}
