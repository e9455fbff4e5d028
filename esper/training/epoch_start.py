"""The state of hosts before an epoch, so that the epoch can be repeated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from esper.training.contents import TensorSnapshot, all_generators, all_tensors
from esper.training.host_training import HostTraining


@dataclass(frozen=True)
class _HostStart:
    epoch: int
    shadows: set[str]
    scale: dict[str, Any]
    generators: dict[str, Tensor]
    copies: TensorSnapshot


class EpochStart:
    """Copies of everything that an epoch changes in its hosts, except what ``begin_epoch`` sets anyway.

    Copies of a host on a GPU lie in pinned CPU memory, because they are made when the GPU has little left.

    Args:
        hosts: all hosts whose data is read, whether they train in this epoch or not.
    """

    def __init__(self, hosts: Iterable[HostTraining]) -> None:
        self._orders = [(training.order, training.order.get_state()) for training in hosts]
        self._hosts: dict[int, _HostStart] = {}

    def capture(self, training: HostTraining) -> None:
        """Copies the state of a host, on its lane."""
        copies = TensorSnapshot(pinned=True)
        copies.capture(all_tensors(training))
        self._hosts[training.index] = _HostStart(
            training.epoch,
            set(training.shadows),
            training.arithmetic.state_dict(),
            {name: generator.get_state() for name, generator in all_generators(training).items()},
            copies,
        )

    def restore(self, training: HostTraining) -> None:
        """Restores a host bit for bit, on its lane, and drops its gradients.

        A host whose capture failed has not trained since, and stays as it is.
        """
        start = self._hosts.get(training.index)
        if start is None:
            return
        training.epoch, training.batch, training.part = start.epoch, 0, 0
        training.arithmetic.load_state_dict(start.scale)
        for group in (training.host_group, *training.seed_groups.values()):
            for parameter in group.parameters:
                parameter.grad = None
        for name in training.shadows.keys() - start.shadows:
            del training.shadows[name]  # made when the epoch began
        for name, generator in all_generators(training).items():
            generator.set_state(start.generators[name])
        start.copies.restore(all_tensors(training))

    def restore_orders(self) -> None:
        """Restores the generators of the order of samples; streamed data also draws from those of idle hosts."""
        for generator, state in self._orders:
            generator.set_state(state)
