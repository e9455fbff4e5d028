"""The state of a host in training: copies, restoring and resuming."""

from __future__ import annotations

import gc

import pytest

from esper.core.blueprints import BLUEPRINTS
from esper.core.stage import SeedStage
from esper.env.training_backend import copies_held
from esper.training.host_state import (
    all_tensors,
    host_state,
    load_host_state,
    restore_host_state,
)
from esper.training.host_training import HostTraining
from tests.core_helpers import (
    DAMAGE,
    make_training,
    plant,
    rig,
    same_bits,
    tensors_of,
    train,
)
from tests.training.live_tensors import STATM, resident_mib


def test_the_start_of_an_epoch_comes_back() -> None:
    training = make_training()
    plant(training, "r0c0", stage=SeedStage.HOLDING)
    train(training)
    start = host_state(training)
    before = tensors_of(training, ("r0c0",))
    train(training)
    after = tensors_of(training, ("r0c0",))
    restore_host_state(training, start)
    same_bits(tensors_of(training, ("r0c0",)), before)
    train(training)
    same_bits(tensors_of(training, ("r0c0",)), after)


def grown() -> HostTraining:
    training = make_training()
    plant(training, "r0c0", stage=SeedStage.HOLDING)
    plant(training, "r0c1", "norm", "GATED_GATE")
    train(training, 2)
    return training


def test_another_host_resumes_to_the_same_bits() -> None:
    training, other, slots = grown(), make_training(seed=9), ("r0c0", "r0c1")
    load_host_state(other, host_state(training), BLUEPRINTS)
    for site, wanted in (
        (other.site_by_name[name], training.site_by_name[name]) for name in slots
    ):
        site.assign(wanted.role, wanted.alpha, wanted.target)
    assert (other.epoch, other.germinations, other.run_seed) == (2, 2, 0)
    for _ in range(2):
        same_bits(tensors_of(other, slots), tensors_of(training, slots))
        train(other)
        train(training)


def test_a_state_without_a_tensor_of_the_host_is_refused() -> None:
    state = host_state(grown())
    state["tensors"] = {
        name: value
        for name, value in state["tensors"].items()
        if name != "r0c1 is finite"
    }
    with pytest.raises(ValueError, match=r"its tensors are .*'r0c1 is finite'"):
        load_host_state(make_training(), state, BLUEPRINTS)


def test_saved_tensors_share_no_memory_with_the_host() -> None:
    training = grown()
    state = host_state(training)
    live = {tensor.data_ptr() for _, tensor in all_tensors(training)}
    assert not live & {tensor.data_ptr() for tensor in state["tensors"].values()}
    assert {"r0c0 is finite", "r0c1.shadow.0"} <= state["tensors"].keys()


def test_a_snapshot_keeps_the_seeds_that_are_named_and_drops_gradients() -> None:
    training = grown()
    assert {
        name.partition(".")[0] for name, _ in training.network_tensors(("r0c0",))
    } == {"host", "r0c0"}
    training.discard(kept=("r0c0",), saved={}, layers={})
    assert set(training.seed_groups) == {"r0c0"}
    assert training.site_by_name["r0c1"].seed is None
    assert all(p.grad is None for p in training.host.parameters())


# --- the same bits from anywhere


def test_held_copies_are_counted_by_host() -> None:
    """Two snapshots of the host alone: twice its tensors and their momentum."""
    with rig(n_envs=2, horizon=8, governor={"snapshot_every": 1}) as world:
        for _ in range(2):
            world.step()
        host = world.training().host
        momentum = sum(parameter.nbytes for parameter in host.parameters())
        one = sum(tensor.nbytes for tensor in host.state_dict().values()) + momentum
        assert [dict(held) for held in world.env.backend.map_hosts(copies_held)] == [
            {"cpu": 2 * one}
        ] * 2


@pytest.mark.finding("C4")
@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")
def test_memory_is_flat_over_1000_episodes() -> None:
    """Each with a seed, snapshots after every epoch, and a rollback."""
    with rig(horizon=4, governor={"snapshot_every": 1}) as world:
        sizes = []
        for episode in range(1, 1001):
            world.reset()
            world.grow("r0c0", SeedStage.TRAINING, "norm")
            DAMAGE["NaN weight"](world.training())
            world.step()
            assert world.host().governor.rollbacks == 1
            world.events.clear()
            if episode in (100, 1000):
                gc.collect()
                sizes.append(resident_mib())
        # A snapshot is 6 KiB: one that stayed behind in every episode would be 5 MiB.
        assert sizes[1] - sizes[0] < 3, sizes
