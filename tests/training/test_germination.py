"""Germination is a transaction: after a failure, slot, host and random numbers are as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.core.blueprints import BLUEPRINTS, Blueprint, BlueprintRegistry
from esper.core.ramps import STYLES
from esper.core.site import GerminationFailed, Role, Site
from esper.core.stage import SeedStage
from esper.telemetry.event import ActionTaken
from esper.training.host_training import HostTraining
from tests.core_helpers import make_training, plant, rig, same_bits, tensors_of, train

S = SeedStage


class Make(nn.Module):
    """A body that computes a given function."""

    def __init__(self, forward: Callable[[Tensor], Any], parameters: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(parameters)) if parameters else None
        self.function = forward

    def forward(self, h: Tensor) -> Any:
        return self.function(h)


def blueprint(
    build: Callable[[int], nn.Module], size: Callable[[int], int] = lambda _channels: 3
) -> Blueprint:
    return Blueprint("cnn", "own", "a test's own", build, size)


def failing_factory(_channels: int) -> nn.Module:
    torch.rand(7)
    raise RuntimeError("no such layer")


def out_of_memory(_h: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("too large")


REFUSED = {
    "factory raises": failing_factory,
    "out of memory": lambda _c: Make(out_of_memory),
    "fewer pixels": lambda _c: Make(lambda h: h[:, :, ::2]),
    "more channels": lambda _c: Make(lambda h: torch.cat([h, h], dim=1)),
    "no batch": lambda _c: Make(lambda h: h[0]),
    "NaN": lambda _c: Make(lambda h: h * float("nan")),
    "infinite": lambda _c: Make(lambda h: h + float("inf")),
    "another size": lambda _c: Make(lambda h: h, parameters=4),
}
BROKEN = {
    "not a tensor": lambda _c: Make(lambda h: (h, h)),
    "no parameters": lambda _c: Make(lambda h: h, parameters=0),
}


def state_of(training: HostTraining, slot: Site) -> dict[str, Any]:
    return {
        **vars(slot),
        "groups": dict(training.seed_groups),
        "shadows": dict(training.shadows),
        "germinations": training.germinations,
        "global_seeds": set(training.global_seeds),
        "mode": training.host.training,
    }


def check_untouched(
    build: Callable[[int], nn.Module], expected: type[Exception]
) -> None:
    training = make_training()
    train(training)
    slot = training.site_by_name["r0c1"]
    before, tensors, rng = (
        state_of(training, slot),
        tensors_of(training),
        torch.get_rng_state(),
    )
    order = training.order.get_state()
    with pytest.raises(
        expected, match="own in r0c1" if expected is GerminationFailed else None
    ):
        training.plant(slot, blueprint(build), STYLES["LINEAR_ADD"])
    assert state_of(training, slot) == before
    same_bits(tensors, tensors_of(training))
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(training.order.get_state(), order)
    plant(training, "r0c1")  # and the slot is usable
    train(training)


@pytest.mark.trap(9)
@pytest.mark.parametrize("name", [*REFUSED, *BROKEN])
def test_a_failed_germination_leaves_everything_as_it_was(name: str) -> None:
    """The error names blueprint and slot."""
    if name in REFUSED:
        check_untouched(REFUSED[name], GerminationFailed)
    else:
        check_untouched(BROKEN[name], Exception)


def test_the_probe_touches_no_buffer_and_no_random_number_of_the_process() -> None:
    training = make_training()
    train(training)
    tensors, rng = tensors_of(training), torch.get_rng_state()
    for name in ("r0c0", "r1c0", "r0c1", "r1c1"):
        plant(training, name, stage=S.GERMINATED)
    same_bits(tensors, tensors_of(training))
    assert torch.equal(torch.get_rng_state(), rng)
    assert training.host.training


def test_a_failed_germination_does_not_shift_the_seeds_that_follow() -> None:
    weights = []
    for fails in (False, True):
        training = make_training()
        if fails:
            with pytest.raises(GerminationFailed):
                training.plant(
                    training.site_by_name["r1c1"],
                    blueprint(failing_factory),
                    STYLES["LINEAR_ADD"],
                )
        seed = plant(training, "r0c0").seed
        assert seed is not None
        weights.append(torch.cat([p.detach().flatten() for p in seed.parameters()]))
    assert torch.equal(*weights)


def test_two_seeds_of_an_episode_start_differently_and_each_the_same_in_every_run() -> (
    None
):
    first, second = (make_training() for _ in range(2))
    for training in (first, second):
        plant(training, "r0c0")
        plant(training, "r1c0")
    same_bits(tensors_of(first, ("r0c0", "r1c0")), tensors_of(second, ("r0c0", "r1c0")))
    mine = tensors_of(first, ("r0c0", "r1c0"))
    assert not torch.equal(mine["r0c0.parameter.0"], mine["r1c0.parameter.0"])


def test_the_env_refuses_a_failed_germination_with_the_reason() -> None:
    registry = BlueprintRegistry(
        (BLUEPRINTS.get("cnn", "norm"), blueprint(REFUSED["more channels"]))
    )
    with rig(blueprints=registry) as world:
        world.do("GERMINATE", "r0c0", "own")
        (event,) = world.of_kind(ActionTaken)
        assert not event.accepted
        assert "own in r0c0" in event.reason
        assert world.value("last_op_succeeded") == 0
        assert world.value("r0c0/stage_dormant") == 1
        assert world.info["illegal_actions"].tolist() == [0]
        assert world.info["reward_terms"]["action_cost"].tolist() == [-0.015]
        world.do("GERMINATE", "r0c0", "norm")
        assert world.value("r0c0/stage_germinated") == 1


class Unused(nn.Module):
    """One parameter is not on the way to the output, as in a body with an optional branch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.1))
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scale


def test_a_users_seed_with_an_unused_parameter_incubates() -> None:
    training = make_training()
    training.plant(
        training.site_by_name["r0c0"],
        blueprint(Unused, lambda channels: channels + 3),
        STYLES["LINEAR_ADD"],
    )
    training.assign(
        training.site_by_name["r0c0"], Role.INCUBATING, 0.0, 1.0, learning=True
    )
    before = tensors_of(training, ("r0c0",))["r0c0.parameter.0"]
    train(training)
    assert not torch.equal(before, tensors_of(training, ("r0c0",))["r0c0.parameter.0"])


class Dropped(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.Dropout(0.5))

    def forward(self, h: Tensor) -> Tensor:
        return 0.1 * self.layers(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [S.TRAINING, S.HOLDING])
def test_dropout_in_a_seed_draws_from_the_hosts_own_generator(stage: SeedStage) -> None:
    """Two runs of one seed are the same bits, and the process's generator is not used up."""
    registry = BlueprintRegistry(
        (blueprint(Dropped, lambda channels: channels * channels + channels),)
    )
    results = []
    rng = torch.get_rng_state()
    for _ in range(2):
        training = make_training()
        plant(training, "r0c0", "own", stage=stage, registry=registry)
        train(training)
        results.append(tensors_of(training, ("r0c0",)))
    same_bits(*results)
    assert torch.equal(torch.get_rng_state(), rng)
