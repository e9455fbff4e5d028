"""Rewards of real episodes are those of the measurements."""

import pytest

from esper.core.stage import SeedStage
from tests.core_helpers import DAMAGE, rig

S = SeedStage


LOSS = {"reward": {"mode": "loss_shaped"}, "env": {"baseline_episodes": 2}}


def test_after_a_rollback_the_loss_reward_reads_the_restored_network() -> None:
    """Measurements of the bad epoch are dropped: accuracy and loss are those of the committed network."""
    with rig(
        horizon=14,
        governor={"snapshot_every": 1},
        task={"samples_per_epoch": 512},
        **LOSS,
    ) as world:
        world.grow("r0c0", S.FOSSILIZED)
        world.grow("r1c0", S.HOLDING)
        good = world.measurement()
        DAMAGE["NaN weight"](world.training())
        world.step()
        assert world.info["reward_terms"]["governor"][0] == -10
        fleet = world.env.state
        assert fleet.loss[0] == fleet.committed_loss[0] == good.committed_loss
        assert fleet.all_off_loss[0] == good.all_off_loss
        off, on = (min(loss, 2.3) for loss in (good.all_off_loss, good.committed_loss))
        potential = world.env.reward.stored["loss_contribution_potential"][0]
        assert potential == pytest.approx(0.1 * (off - on) / 0.1)
