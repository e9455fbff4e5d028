"""Roles of seeds in training follow from the lifecycle."""

from __future__ import annotations

import pytest

from esper.env.host_row import assign_roles, role_of
from esper.lifecycle.stage import SeedStage
from esper.seeds.site import Role
from tests.core_helpers import rig

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
            training, world.env.local.each[0].slot_sites, world.env.state.slots, row=0
        )
        assert (site.role, site.target, site.learning) == (
            Role.INCUBATING,
            target,
            True,
        )
        assert {other.role for other in training.sites if other is not site} == {
            Role.ABSENT
        }
