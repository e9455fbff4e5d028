"""Snapshots of one env's host and fossils, with all that a rollback puts back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from esper.seeds.gate import SeedMeasurements
from esper.seeds.stage import SeedStage
from esper.training.env_state import ParallelEnvState


@dataclass(frozen=True)
class ValidationRecord:
    """What validation said about the committed network (fossils only) at one epoch, and about its host alone;
    accuracies pp."""

    loss: float
    committed: float
    all_off: float
    all_off_loss: float


class Snapshot:
    """Copies of host, buffers, fossils and their momentum. Its storage is kept and filled again by the next capture.

    Every tensor is copied every time: momentum, and everything in a captured step, is written without raising
    ``_version``, so nothing tells cheaply which tensors have changed, and in training hosts all of them do.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.fossils: tuple[str, ...] = ()
        self.record = ValidationRecord(0.0, 0.0, 0.0, 0.0)
        self._measured: dict[str, SeedMeasurements] = {}
        self._copies: dict[str, Tensor] = {}

    def capture(self, env: ParallelEnvState, record: ValidationRecord) -> None:
        """Copy the env's present state; tensors of an earlier capture are overwritten in place."""
        self.epoch, self.record = env.epoch, record
        self.fossils = tuple(slot.name for slot in env.fossils())
        self._measured = {slot.name: replace(slot.measured) for slot in env.fossils()}
        live = dict(network_tensors(env, self.fossils))
        with torch.no_grad():
            for name in [name for name in self._copies if name not in live]:
                del self._copies[name]
            for name, tensor in live.items():
                kept = self._copies.get(name)
                if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
                    kept.copy_(tensor)
                else:
                    self._copies[name] = tensor.detach().clone()

    def restore(self, env: ParallelEnvState) -> None:
        """Put everything back, bit for bit; prune living seeds, and fossils that the snapshot does not know.

        Clocks, schedules and generators do not rewind. The scale of losses in float16 is as at first.
        """
        for slot in env.slots:
            if slot.stage is SeedStage.FOSSILIZED and slot.name not in self.fossils:
                slot.revoke_fossil()
            elif slot.living:
                slot.cut("rollback")
        env.forget_removed_seeds()
        env.host_group.optimizer.zero_grad(set_to_none=True)
        env.arithmetic.reset()
        for name in self.fossils:
            env.seed_groups[name].optimizer.zero_grad(set_to_none=True)
            # What the bad epoch measured of a fossil is not true of the restored one.
            measured, since = self._measured[name], env.epoch - self.epoch
            if measured.contribution is not None:
                measured = replace(measured, epochs_since_measured=measured.epochs_since_measured + since)
            env.slot_by_name[name].measured = replace(measured)
        with torch.no_grad():
            for name, tensor in network_tensors(env, self.fossils):
                tensor.copy_(self._copies[name])

    def state_dict(self) -> dict[str, Any]:
        """The snapshot as plain values and CPU tensors; copies."""
        return {
            "epoch": self.epoch,
            "fossils": list(self.fossils),
            "record": asdict(self.record),
            "measured": {name: asdict(measured) for name, measured in self._measured.items()},
            "copies": {name: copy.cpu().clone() for name, copy in self._copies.items()},
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Become the snapshot that ``state`` was taken from, for an env on ``device``."""
        self.epoch, self.fossils = state["epoch"], tuple(state["fossils"])
        self.record = ValidationRecord(**state["record"])
        self._measured = {name: SeedMeasurements(**measured) for name, measured in state["measured"].items()}
        self._copies = {name: copy.to(device, copy=True) for name, copy in state["copies"].items()}

    @property
    def bytes(self) -> int:
        """Memory held by the copies."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies.values())


def network_tensors(env: ParallelEnvState, slots: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the host and of the seeds in ``slots``, with their optimizers' momentum, by stable names."""
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


def _tensors(owner: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each once however often it is used, and buffers, those that a state dict leaves out too."""
    for name, parameter in module.named_parameters():
        yield f"{owner}.{name}", parameter
    for name, buffer in module.named_buffers():
        yield f"{owner}.{name}", buffer
