"""What an epoch of training changes in one env, as it was before, so that the epoch can be done again."""

from __future__ import annotations

from torch import Tensor

from esper.training.contents import TensorSnapshot, all_generators, all_tensors
from esper.training.host_training import HostTraining


class EpochStart:
    """Copies of host, seeds, momentum and the buffers of shadows, and the states of generators.

    Its storage is kept and filled again by the next capture. What :func:`esper.training.step.begin_epoch` sets
    anew is not in it.

    Args:
        pinned: whether copies of a host on a GPU lie in pinned CPU memory.
    """

    _generators: dict[str, Tensor]
    """Their states, by name."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.forget()

    def capture(self, training: HostTraining) -> None:
        """Copy the env's present state; where there is no memory for that, nothing has been trained yet."""
        self._taken = False
        self.epoch, self._shadows = training.epoch, set(training.shadows)
        self._scale = training.arithmetic.state_dict()
        self._generators = {name: generator.get_state() for name, generator in all_generators(training).items()}
        self._copies.capture(all_tensors(training))
        self._taken = True

    def forget(self) -> None:
        """Give the memory back: nothing is going to be restored."""
        self._copies = TensorSnapshot(self.pinned)
        self._generators = {}
        self._taken = False

    def restore(self, training: HostTraining) -> None:
        """Put everything back, bit for bit; gradients, of whatever step they are, go. An env of which no copy could be
        taken did nothing after that, and stays as it is."""
        if not self._taken:
            return
        training.epoch, training.batch, training.part = self.epoch, 0, 0
        training.arithmetic.load_state_dict(self._scale)
        for group in (training.host_group, *training.seed_groups.values()):
            for parameter in group.parameters:
                parameter.grad = None
        for name in [name for name in training.shadows if name not in self._shadows]:
            del training.shadows[name]  # its incubation began in the epoch that is done again
        for name, generator in all_generators(training).items():
            generator.set_state(self._generators[name])
        self._copies.restore(all_tensors(training))

    @property
    def bytes(self) -> int:
        """Memory held by the copies."""
        return self._copies.bytes

    @property
    def place(self) -> str:
        """Where the copies lie: ``cpu``, ``cuda:0``, ... or ``pinned``."""
        return self._copies.place
