"""Snapshots of one host and its fossils, with all that a rollback restores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from esper.training.contents import TensorSnapshot, network_tensors
from esper.training.host_training import HostTraining


@dataclass(frozen=True)
class ValidationRecord:
    """Validation of the committed network (fossils only) at one epoch, and of its host alone; accuracies pp."""

    loss: float
    committed: float
    all_off: float
    all_off_loss: float


class Snapshot:
    """Copies of host, buffers, fossils and their momentum, in storage that the next capture fills again.

    Every tensor is copied every time: momentum, and everything in a captured step, is written without raising
    ``_version``, so nothing tells cheaply which tensors have changed, and in training hosts all of them do.

    Args:
        pinned: whether copies of a host on a GPU lie in pinned CPU memory.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.epoch = -1
        self.measured: dict[str, dict[str, float]] = {}
        """Measurements of each fossil by name, kept for the caller."""
        self.record = ValidationRecord(0.0, 0.0, 0.0, 0.0)
        self._copies = TensorSnapshot(pinned)

    def capture(
        self, training: HostTraining, record: ValidationRecord, measured: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Copies the present state of the host and of the fossils that ``measured`` names.

        Tensors of an earlier capture are overwritten in place.
        """
        self.epoch, self.record = training.epoch, record
        self.measured = {name: dict(values) for name, values in measured.items()}
        self._copies.capture(network_tensors(training, self.measured))

    def take_over(self, other: Snapshot) -> None:
        """Becomes a copy of ``other``, which may then be overwritten."""
        self.epoch, self.record, self.measured = other.epoch, other.record, other.measured
        self._copies.capture(other._copies.tensors.items())

    def restore(self, training: HostTraining) -> None:
        """Restores host and fossils bit for bit, and removes every other seed.

        Clocks, schedules and generators do not rewind. The scale of losses in float16 is as at first.
        """
        for site in training.sites:
            if site.seed is not None and site.name not in self.measured:
                training.remove(site)
        training.arithmetic.reset()
        for group in (training.host_group, *training.seed_groups.values()):
            group.optimizer.zero_grad(set_to_none=True)
        self._copies.restore(network_tensors(training, self.measured))

    def state_dict(self) -> dict[str, Any]:
        """The snapshot as plain values and CPU tensors; copies."""
        return {
            "epoch": self.epoch,
            "record": asdict(self.record),
            "measured": {name: dict(values) for name, values in self.measured.items()},
            "copies": self._copies.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Become the snapshot that ``state`` was taken from, for an env on ``device``."""
        self.epoch, self.measured = state["epoch"], {name: dict(v) for name, v in state["measured"].items()}
        self.record = ValidationRecord(**state["record"])
        self._copies.load_state_dict(state["copies"], device)

    @property
    def bytes(self) -> int:
        """Memory held by the copies."""
        return self._copies.bytes

    @property
    def place(self) -> str:
        """Where the copies lie: ``cpu``, ``cuda:0``, ... or ``pinned``."""
        return self._copies.place

    @property
    def pinned(self) -> bool:
        """Whether copies of a host on a GPU lie in pinned CPU memory."""
        return self._copies.pinned
