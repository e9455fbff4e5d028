"""Memory over a long run."""

import gc

import pytest

from esper.lifecycle.stage import SeedStage
from tests.core_helpers import DAMAGE, rig
from tests.training.live_tensors import STATM, resident_mib


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
