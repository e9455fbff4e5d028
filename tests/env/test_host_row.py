"""Measurements, roles and the governor's effects in the row of one host."""

from __future__ import annotations

import pytest

from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.site import Role
from esper.core.stage import SeedStage
from esper.data.tasks import load_task
from esper.env.host_row import assign_roles, role_of
from esper.env.vector_env import GrowthVectorEnv
from esper.telemetry.event import GovernorRollback
from esper.training.metrics import GradientSummary
from tests.core_helpers import DAMAGE, flat_baseline, rig, same_bits, tensors_of


@pytest.mark.parametrize(
    ("vanishing", "exploding"), [(0.5, 0.8), (0.0, 1.0), (1.0, 0.0)]
)
def test_gradient_health_is_weighted_by_the_config(
    vanishing: float, exploding: float
) -> None:
    """A fifth of the tensors vanish and three tenths explode; the operator's own weights give 0.66."""
    own = 1 - 0.5 * 0.2 - 0.8 * 0.3
    summary = GradientSummary(
        norm=1.0, elements=1.0, health=own, vanishing=0.2, exploding=0.3, not_finite=0.0
    )
    assert summary.health_by(0.5, 0.8) == own
    assert summary.health_by(vanishing, exploding) == pytest.approx(
        1 - vanishing * 0.2 - exploding * 0.3
    )


@pytest.mark.parametrize(
    ("limit", "exploding", "health"), [(10.0, 0.0, 1.0), (1e-12, 1.0, 0.75)]
)
def test_the_config_says_which_gradients_explode(
    limit: float, exploding: float, health: float
) -> None:
    tables = {
        "task": {"samples_per_epoch": 64, "exploding_gradient": limit},
        "env": {"n_envs": 1, "episode_length": 6, "gates": {"exploding_weight": 0.25}},
    }
    env = GrowthVectorEnv(
        load_task("digits"), TrainingConfig.parse(tables), baseline=flat_baseline(6)
    )
    env.reset(seed=0)
    spec, slot = env.action_spec, env.action_spec.slots[0]
    for action in (
        spec.encode(Op.GERMINATE, slot, "conv_light"),
        spec.encode(Op.ADVANCE, slot),
    ):
        env.step(action[None])
    measured = env.state.slots
    assert (measured.exploding[0, 0], measured.gradient_health[0, 0]) == (
        exploding,
        health,
    )
    env.close()


S = SeedStage


@pytest.mark.parametrize(
    ("stage", "alpha", "role"),
    [
        (S.GERMINATED, 0.0, Role.ABSENT),
        (S.TRAINING, 0.0, Role.INCUBATING),
        (S.BLENDING, 0.0, Role.ABSENT),
        (S.BLENDING, 0.1, Role.BLENDED),
        (S.HOLDING, 1.0, Role.BLENDED),
        (S.FOSSILIZED, 1.0, Role.FOSSIL),
    ],
)
def test_a_role_follows_from_the_stage_and_the_share(
    stage: SeedStage, alpha: float, role: Role
) -> None:
    assert role_of(int(stage), alpha) is role


def test_seeds_get_the_roles_of_their_row_and_empty_sites_get_none() -> None:
    with rig() as world:
        world.grow("r0c0", S.TRAINING)
        training = world.env.training[0]
        site = training.site_by_name["r0c0"]
        target = site.target
        site.assign(Role.ABSENT)
        assign_roles(
            training, world.env.local.hosts[0].slot_sites, world.env.state.slots, row=0
        )
        assert (site.role, site.target, site.learning) == (
            Role.INCUBATING,
            target,
            True,
        )
        assert {other.role for other in training.sites if other is not site} == {
            Role.ABSENT
        }


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


@pytest.mark.trap(5)
def test_a_fossil_made_in_the_step_of_the_panic_is_pruned() -> None:
    with rig(horizon=10, governor=EVERY_EPOCH) as world:
        world.grow("r0c0", S.HOLDING)
        break_host(world.training())
        world.do("FOSSILIZE", "r0c0")
        assert len(world.of_kind(GovernorRollback)) == 1
        assert world.slot("r0c0").seed is None
        assert world.value("fossil_parameters") == 0
