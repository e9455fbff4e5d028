"""Sites: roles, alphas, and the seed that is planted."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from esper.core.blend import Seed
from esper.core.blueprints import BLUEPRINTS, Blueprint
from esper.core.place import Features, Place
from esper.core.ramps import STYLES
from esper.core.site import (
    GerminationFailed,
    PlantedSeed,
    Role,
    Site,
    guard_group_norm,
)

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


def test_a_guarded_layer_computes_what_it_did() -> None:
    torch.manual_seed(0)
    layer, x = nn.GroupNorm(2, 8), torch.randn(4, 8, 4, 4)
    inputs = {
        "plain": x,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
    }
    wanted = layer(x)
    guard_group_norm(layer)
    for h in inputs.values():
        torch.testing.assert_close(layer(h), wanted)
        assert torch.equal(layer(input=h), layer(h))
        with torch.inference_mode():
            assert (
                layer(h).stride() == h.stride()
            )  # nothing is laid out anew where nothing is wrong
        assert layer(h.clone().requires_grad_()).stride() == h.stride()


SEEDS = """
import torch
from torch import nn
from esper.hosts.seed_hook import attach
from esper.core.ramps import STYLES
from esper.core.blueprints import BLUEPRINTS
from esper.core.place import Features
from esper.core.place import Place
from esper.core.site import Site
x = torch.randn(4, 8, 4, 4).contiguous(memory_format=torch.channels_last)
for name in BLUEPRINTS.names("cnn"):
    probe = Features.at_sink(x)
    seed = Site(Place("r0c0", 8)).plant(BLUEPRINTS.get("cnn", name), STYLES["LINEAR_ADD"], probe).module
    seed(x).square().sum().backward()  # beside a network, in any loop
    model = nn.Sequential(nn.Identity())
    attach(model, {"0": ("r0c0", seed, 0.5)})
    model.train()(x).square().sum().backward()  # kept in a network whose layers before it are frozen
print("done")
"""


@pytest.mark.slow
def test_every_seed_is_guarded_wherever_it_is_planted() -> None:
    done = subprocess.run([sys.executable, "-c", SEEDS], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "done")
