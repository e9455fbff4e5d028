"""Sites: roles, alphas, and the seed that is planted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.lifecycle.ramps import STYLES
from esper.seeds.blend import Seed
from esper.seeds.blueprints import BLUEPRINTS, Blueprint
from esper.seeds.features import Features
from esper.seeds.site import GerminationFailed, Place, PlantedSeed, Role, Site

PROBE = Features.at_sink(torch.randn(2, 4, 3, 3))


def site() -> Site:
    return Site(Place("r0c0", 4))


def planted() -> tuple[Site, PlantedSeed]:
    made = site()
    return made, made.plant(BLUEPRINTS.get("cnn", "norm"), STYLES["LINEAR_ADD"], PROBE)


@pytest.mark.parametrize(
    ("role", "on", "learning"),
    [
        (Role.ABSENT, False, False),
        (Role.INCUBATING, False, True),
        (Role.BLENDED, True, True),
        (Role.FOSSIL, True, True),
    ],
)
def test_a_role_says_whether_its_seed_is_in_the_forward_pass_and_learns(
    role: Role, on: bool, learning: bool
) -> None:
    made, _ = planted()
    made.assign(role, 0.25, 0.75)
    assert (made.on, made.learning, made.alpha, made.target) == (
        on,
        learning,
        0.25,
        0.75,
    )
    assert (made.incubating, made.fossil) == (
        role is Role.INCUBATING,
        role is Role.FOSSIL,
    )
    made.assign(role, learning=False)
    assert not made.learning


def test_a_site_without_a_seed_is_empty() -> None:
    made, _ = planted()
    assert made.parameters == 8
    made.assign(Role.BLENDED, 1.0)
    made.remove()
    assert (made.planted, made.seed, made.parameters) == (None, None, 0)
    assert (made.role, made.alpha) == (Role.ABSENT, 0.0)
    with pytest.raises(ValueError, match="r0c0 has no seed that could be BLENDED"):
        made.assign(Role.BLENDED, 1.0)
    assert made.role is Role.ABSENT


def test_a_blueprint_that_does_not_fit_leaves_the_seed_before_it() -> None:
    made, before = planted()
    build = lambda c: nn.Sequential(nn.Conv2d(c, c, 1), nn.MaxPool2d(2))  # noqa: E731
    pooled = Blueprint("cnn", "pooled", "", build, lambda _: 20)
    with pytest.raises(
        GerminationFailed,
        match=r"pooled in r0c0 turns \(2, 4, 3, 3\) into \(2, 4, 1, 1\)",
    ):
        made.plant(pooled, STYLES["LINEAR_ADD"], PROBE)
    assert made.planted is before


def test_a_frozen_body_has_nothing_to_train() -> None:
    frozen = Blueprint(
        "cnn",
        "frozen",
        "",
        lambda c: nn.Conv2d(c, c, 1).requires_grad_(False),
        lambda _: 20,
    )
    with pytest.raises(GerminationFailed, match="no parameters to train"):
        site().plant(frozen, STYLES["LINEAR_ADD"], PROBE)


def test_the_prepared_seed_is_planted_and_one_that_comes_back_keeps_its_flag() -> None:
    made, kept = (
        site(),
        Seed(nn.Conv2d(4, 4, 1), STYLES["LINEAR_ADD"].operator, 4, "cnn"),
    )
    for _ in range(2):
        seed = made.plant(
            BLUEPRINTS.get("cnn", "norm"),
            STYLES["LINEAR_ADD"],
            PROBE,
            lambda _seed: kept.eval(),
        )
        assert made.seed is seed.module is kept
        assert kept.training
        assert bool(seed.finite)
        place = seed.finite.data_ptr()
        seed.finite.fill_(False)
        made.remove()
    again = made.plant(
        BLUEPRINTS.get("cnn", "norm"), STYLES["LINEAR_ADD"], PROBE, lambda _seed: kept
    )
    assert again.finite.data_ptr() == place
