"""The state of a host in training: copies, restoring and resuming."""

from __future__ import annotations

from esper.lifecycle.stage import SeedStage
from esper.training.host_state import host_state, pinned_copy, restore_host_state
from tests.core_helpers import (
    make_training,
    plant,
    same_bits,
    tensors_of,
    train,
)


def test_the_start_of_an_epoch_comes_back() -> None:
    training = make_training()
    plant(training, "r0c0", stage=SeedStage.HOLDING)
    train(training)
    start = host_state(training, pinned_copy)
    before = tensors_of(training, ("r0c0",))
    train(training)
    after = tensors_of(training, ("r0c0",))
    restore_host_state(training, start)
    same_bits(tensors_of(training, ("r0c0",)), before)
    train(training)
    same_bits(tensors_of(training, ("r0c0",)), after)
