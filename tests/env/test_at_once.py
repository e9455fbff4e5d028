"""Seeds that are zero at birth become a part of their host in the epoch in which they are planted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from esper.core.action import Op
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.core.site import GerminationFailed, Role
from esper.core.stage import SeedStage as S
from esper.hosts.widen import merge
from esper.telemetry.event import StageChanged
from esper.training.host_training import HostTraining, _make_optimizer
from esper.training.seed_pool import ParameterGroup
from esper.training.step import train_epoch
from tests.core_helpers import make_training, plant, rig, tiny_config
from tests.grower.loops import LENIENT, Loop, do, script
from tests.grower.loops import plant as plant_action

AT_ONCE: dict[str, Any] = {"at_once": True, "slots": ["r0c0", "r2"]}


def test_a_widening_is_kept_when_it_is_planted_and_others_are_incubated() -> None:
    with rig(env=AT_ONCE) as world:
        world.do("GERMINATE", "r2c0", "widen_half")
        slot = world.slot("r2c0")
        assert (slot.stage, slot.alpha, slot.age, slot.parameters) == (
            S.FOSSILIZED,
            1.0,
            1,
            130,
        )
        assert world.training().site_by_name["r2c0"].role is Role.FOSSIL
        assert [
            event.after for event in world.events if isinstance(event, StageChanged)
        ] == ["FOSSILIZED"]
        world.do("GERMINATE", "r0c0", "norm")
        assert world.slot("r0c0").stage is S.GERMINATED
        seed = world.training().site_by_name["r2c0"].seed
        assert seed is not None
        assert torch.count_nonzero(seed.body[-1].weight) > 0, (
            "it learns from the first epoch on"
        )  # type: ignore[index]


def test_without_the_choice_a_widening_is_incubated_as_all_others() -> None:
    with rig(env={"slots": ["r2"]}) as world:
        world.do("GERMINATE", "r2c0", "widen_half")
        assert world.slot("r2c0").stage is S.GERMINATED


def test_several_are_planted_one_after_the_other_without_waiting() -> None:
    with rig(env=AT_ONCE) as world:
        world.do("GERMINATE", "r2c0", "widen_half")
        world.do("GERMINATE", "r2c1", "widen_half")
        assert world.slot("r2c1").stage is S.FOSSILIZED
        assert not world.info["action_mask"]["op_slot"][0, Op.PRUNE].any(), (
            "what is kept stays"
        )


def as_a_wide_host(training: HostTraining, name: str) -> HostTraining:
    """Another host in training that has the seed of ``training`` in its layers."""
    wide = make_training(training.config)
    host, seed = copy.deepcopy((training.host, training.site_by_name[name].seed))
    assert seed is not None
    place = next(place for place in host.sites if place.name == name)
    merge(place.layers, seed.body, 1.0)
    task = training.config.task
    wide.host = host
    wide.host_group = ParameterGroup(
        "host",
        list(host.parameters()),
        _make_optimizer(host, task, wide.rate, task.weight_decay),
        None,
    )
    return wide


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_it_trains_as_the_wider_network_bit_by_bit_of_clipping_and_decay(
    optimizer: str,
) -> None:
    task = {
        "optimizer": optimizer,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
    }
    training = make_training(
        tiny_config(
            env=AT_ONCE, task={"samples_per_epoch": 64, "batch_size": 32, **task}
        )
    )
    plant(training, "r2c0", "widen_whole", stage=S.FOSSILIZED)
    wide = as_a_wide_host(training, "r2c0")
    before = [p.detach().clone() for p in wide.host.parameters()]
    for each in (training, wide):
        train_epoch(each)
        train_epoch(each)
    merged = as_a_wide_host(training, "r2c0")
    moved = 0.0
    for mine, other, start in zip(
        merged.host.parameters(), wide.host.parameters(), before, strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
        moved = max(moved, float((other - start).abs().max()))
    assert moved > 1e-3


def test_a_blueprint_that_is_not_zero_at_birth_though_it_says_so_is_not_planted() -> (
    None
):
    registry: BlueprintRegistry = BLUEPRINTS.copy()
    size = 9 * 3 * 3 + 3
    register = registry.register(
        "cnn", "liar", parameters=lambda channels: size, zero_at_birth=True
    )
    register(lambda channels: nn.Conv2d(channels, channels, 3, padding=1))
    training = make_training(tiny_config(env=AT_ONCE))
    with pytest.raises(GerminationFailed, match="said to be zero at birth"):
        plant(training, "r0c0", "liar", registry=registry)


def test_a_loop_of_ones_own_has_them_at_once_too_with_the_decay_of_their_layers() -> (
    None
):
    config = LENIENT.with_values(env={"at_once": True})
    actions = {
        0: plant_action("r2c0", "widen_half"),
        1: plant_action("r2c1", "widen_half"),
    }
    loop = Loop(
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
        sites={"r2c0": "body.0 -> body.2", "r2c1": "body.2 -> head"},
        controller=script({**actions, 5: do(Op.WAIT, "r2c0")}),
        config=config,
    ).run()
    assert loop.grower is not None
    assert loop.steps[1].slots["r2c0"].stage == "FOSSILIZED"
    assert loop.grower.kept == {"r2c0": "widen_half", "r2c1": "widen_half"}
    assert [group["weight_decay"] for group in loop.optimizer.param_groups] == [
        0.01
    ] * 3
    curve = loop.grower.env.without_seeds[0]  # type: ignore[union-attr]
    assert len(set(curve[1:].tolist())) == 1, (
        "what the model would be without them is not known"
    )
    merged = loop.grower.finish(merge=True)
    assert merged.body[0].out_features == 18  # type: ignore[index, union-attr]
    assert len(loop.optimizer.param_groups) == 1
