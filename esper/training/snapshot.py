"""Snapshots of one env's host and fossils, with all that a rollback puts back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from esper.seeds.gate import SeedMeasurements
from esper.seeds.stage import SeedStage
from esper.training.contents import TensorSnapshot, network_tensors
from esper.training.host_training import HostTraining


@dataclass(frozen=True)
class ValidationRecord:
    """What validation said about the committed network (fossils only) at one epoch, and about its host alone;
    accuracies pp."""

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
        self.fossils: tuple[str, ...] = ()
        self.record = ValidationRecord(0.0, 0.0, 0.0, 0.0)
        self._measured: dict[str, SeedMeasurements] = {}
        self._copies = TensorSnapshot(pinned)

    def capture(self, training: HostTraining, record: ValidationRecord) -> None:
        """Copy the env's present state; tensors of an earlier capture are overwritten in place."""
        self.epoch, self.record = training.epoch, record
        self.fossils = tuple(slot.name for slot in training.fossils())
        self._measured = {slot.name: replace(slot.measured) for slot in training.fossils()}
        self._copies.capture(network_tensors(training, self.fossils))

    def take_over(self, other: Snapshot) -> None:
        """Become a copy of ``other``, which may then be overwritten."""
        self.epoch, self.record, self.fossils = other.epoch, other.record, other.fossils
        self._measured = {name: replace(measured) for name, measured in other._measured.items()}
        self._copies.capture(other._copies.tensors.items())

    def restore(self, training: HostTraining) -> None:
        """Put everything back, bit for bit; prune living seeds, and fossils that the snapshot does not know.

        Clocks, schedules and generators do not rewind. The scale of losses in float16 is as at first.
        """
        for slot in training.slots:
            if slot.stage is SeedStage.FOSSILIZED and slot.name not in self.fossils:
                slot.revoke_fossil()
            elif slot.living:
                slot.cut("rollback")
        training.forget_removed_seeds()
        training.host_group.optimizer.zero_grad(set_to_none=True)
        training.arithmetic.reset()
        for name in self.fossils:
            training.seed_groups[name].optimizer.zero_grad(set_to_none=True)
            # What the bad epoch measured of a fossil is not true of the restored one.
            measured, since = self._measured[name], training.epoch - self.epoch
            if measured.contribution is not None:
                measured = replace(measured, epochs_since_measured=measured.epochs_since_measured + since)
            training.slot_by_name[name].measured = replace(measured)
        self._copies.restore(network_tensors(training, self.fossils))

    def state_dict(self) -> dict[str, Any]:
        """The snapshot as plain values and CPU tensors; copies."""
        return {
            "epoch": self.epoch,
            "fossils": list(self.fossils),
            "record": asdict(self.record),
            "measured": {name: asdict(measured) for name, measured in self._measured.items()},
            "copies": self._copies.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Become the snapshot that ``state`` was taken from, for an env on ``device``."""
        self.epoch, self.fossils = state["epoch"], tuple(state["fossils"])
        self.record = ValidationRecord(**state["record"])
        self._measured = {name: SeedMeasurements(**measured) for name, measured in state["measured"].items()}
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
