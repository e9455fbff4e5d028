"""The state of a host before an epoch, so that the epoch can be repeated."""

from __future__ import annotations

from esper.training.contents import TensorSnapshot, all_generators, all_tensors
from esper.training.host_training import HostTraining


class EpochStart:
    """Copies of everything that an epoch changes in a host, except what ``begin_epoch`` sets anyway.

    Those of a host on a GPU lie in pinned CPU memory, because they are made when the GPU has little left. Both copying
    and restoring happen on the host's lane.
    """

    def __init__(self, training: HostTraining) -> None:
        self._epoch, self._shadows = training.epoch, set(training.shadows)
        self._scale = training.arithmetic.state_dict()
        self._generators = {name: generator.get_state() for name, generator in all_generators(training).items()}
        self._copies = TensorSnapshot(pinned=True)
        self._copies.capture(all_tensors(training))

    def restore(self, training: HostTraining) -> None:
        """Restores the host bit for bit and drops its gradients."""
        training.epoch, training.batch, training.part = self._epoch, 0, 0
        training.arithmetic.load_state_dict(self._scale)
        for group in (training.host_group, *training.seed_groups.values()):
            for parameter in group.parameters:
                parameter.grad = None
        for name in training.shadows.keys() - self._shadows:
            del training.shadows[name]  # made when the epoch began
        for name, generator in all_generators(training).items():
            generator.set_state(self._generators[name])
        self._copies.restore(all_tensors(training))
