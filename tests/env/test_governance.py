"""Effects of the governor's decisions on slots: rollbacks, removed seeds, and fossils."""

import numpy as np
import pytest

from esper.lifecycle.stage import SeedStage
from esper.telemetry.event import GovernorRollback, SeedCut, StageChanged
from tests.core_helpers import DAMAGE, rig, same_bits, tensors_of

S = SeedStage
EVERY_EPOCH = {"snapshot_every": 1}
break_host = DAMAGE["NaN weight"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_rollback_restores_bit_for_bit(damage: str) -> None:
    with rig(horizon=10, governor=EVERY_EPOCH) as world:
        world.grow("r0c0", S.FOSSILIZED)
        good = tensors_of(world.training(), ("r0c0",))
        before = world.measurement()
        DAMAGE[damage](world.training())
        world.step()
        (event,) = world.of_kind(GovernorRollback)
        assert event.restored_epoch == 6
        same_bits(good, tensors_of(world.training(), ("r0c0",)))
        now = world.measurement()
        assert (now.loss, now.committed, now.all_off) == (
            before.committed_loss,
            before.committed,
            before.all_off,
        )
        assert (
            now.accuracy == before.committed
        )  # fossils only: all on is what is committed
        assert world.value("validation_accuracy") == pytest.approx(
            before.committed / 100
        )
        world.step()
        assert len(world.of_kind(GovernorRollback)) == 1


def test_living_seeds_are_pruned_into_cooldown_and_a_fossil_lives() -> None:
    with rig(
        horizon=20, governor=EVERY_EPOCH, env={"embargo": 2, "one_incubating": False}
    ) as world:
        world.grow("r0c0", S.FOSSILIZED)
        world.grow("r1c0", S.HOLDING)
        world.grow("r0c1", S.TRAINING)
        break_host(world.training())
        world.step()
        assert [
            world.slot(name).stage is S.FOSSILIZED
            for name in ("r0c0", "r1c0", "r0c1", "r1c1")
        ] == [
            True,
            False,
            False,
            False,
        ]
        for name in ("r1c0", "r0c1"):
            assert world.slot(name).seed is None
            assert world.slot(name).stage in (S.PRUNED, S.EMBARGOED)
        assert set(world.training().seed_groups) == {"r0c0"}
        assert world.value("rolled_back") == 1
        world.step()
        assert world.value("rolled_back") == 0


def test_seeds_of_a_broken_host_are_not_to_blame() -> None:
    """Their features are NaN because the host's are, so the rollback removes them; they are not cut as broken seeds."""
    with rig(horizon=10, governor=EVERY_EPOCH) as world:
        world.grow("r1c0", S.HOLDING)
        break_host(world.training())
        world.step()
        assert len(world.of_kind(GovernorRollback)) == 1
        assert world.of_kind(SeedCut) == []
        causes = [
            change.cause
            for change in world.of_kind(StageChanged)
            if change.after == "PRUNED"
        ]
        assert causes == ["rollback"]


@pytest.mark.trap(5)
def test_a_fossil_made_in_the_step_of_the_panic_is_pruned() -> None:
    with rig(horizon=10, governor=EVERY_EPOCH) as world:
        world.grow("r0c0", S.HOLDING)
        break_host(world.training())
        world.do("FOSSILIZE", "r0c0")
        assert len(world.of_kind(GovernorRollback)) == 1
        assert world.slot("r0c0").seed is None
        assert world.value("fossil_parameters") == 0


def test_a_surviving_fossil_is_measured_again_after_a_rollback() -> None:
    """Measurements of the bad epoch are dropped: its zero contribution, and a NaN in a moving average."""
    with rig(horizon=10, governor=EVERY_EPOCH) as world:
        world.grow("r0c0", S.FOSSILIZED)
        break_host(world.training())
        world.step()
        world.step()
        measured = world.slot("r0c0").measured
        assert measured["gradient_ratio"] is not None
        assert np.isfinite(measured["gradient_ratio"])
        assert world.value("r0c0/gradient_ratio") > 0
