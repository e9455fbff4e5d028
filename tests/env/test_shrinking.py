"""PRUNE takes back what has grown: the units of the last merge of a slot fade, and leave their layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.core.action import Op
from esper.core.stage import SeedStage as S
from esper.core.state import OF_HOSTS
from esper.files.grown_host import committed_network, export, load_host
from esper.telemetry.event import EpisodeCompleted, EpochCompleted, StageChanged
from esper.telemetry.seed_history import Life
from esper.training.host_state import all_tensors
from tests.core_helpers import DAMAGE, Rig, digits, rig
from tests.env.test_merging import MERGES, widths
from tests.selection import slow_except

STOPS = (4, 6, 9, 10, 11, 13)


def prunable(world: Rig) -> list[bool]:
    of_env: list[bool] = world.info["action_mask"]["op_slot"][0, Op.PRUNE].tolist()
    return of_env


def twice_grown(world: Rig) -> None:
    world.do("GERMINATE", "r2c0", "widen_whole")
    world.do("GERMINATE", "r2c0", "widen_half")
    assert widths(world) == [9, 6]


def life_of(world: Rig) -> Life:
    life = Life(0, 0)
    for event in world.events:
        life.handle(event)
    return life


def require_exported(network: nn.Module, folder: Path) -> None:
    """A saved host of digits computes the same bits, and without Esper's classes the same outputs."""
    x = digits().test.inputs(0, 50)
    export(network, folder / "host")
    again = load_host(folder / "host", model=digits().build_host())
    assert torch.equal(again(x), network(x))
    plain: Any = esper.plain(again, x, merge=True)
    torch.testing.assert_close(plain(x), network(x))
    assert not any("esper" in type(m).__module__ for m in plain.modules())


def test_pruned_units_fade_and_leave_their_layers() -> None:
    with rig(horizon=14, env=MERGES) as world:
        parameters = world.training().host.parameter_count
        assert not any(prunable(world))
        twice_grown(world)
        assert prunable(world) == [False, True, False]
        merged = world.slot("r2c0").merged_parameters
        grown = world.training().host.parameter_count
        world.do("PRUNE", "r2c0", alpha_speed=3)
        slot = world.slot("r2c0")
        assert (slot.stage, slot.merges, slot.fading) == (S.BLENDING, 1, True)
        assert slot.alpha == pytest.approx(1 / 3)
        assert slot.contribution is not None, "measured together while they fade"
        assert widths(world) == [6, 6]
        assert slot.merged_parameters + slot.parameters == merged
        assert not world.env.rules.choices.removable.any()
        assert not any(prunable(world)), "alpha moves"
        epoch = world.of_kind(EpochCompleted)[-1]
        assert epoch.parameters == grown
        assert (epoch.merges, epoch.widths) == ({"r2c0": 1}, {"r2c0": 2.0, "r0c0": 2.0})
        world.step()
        world.step()
        assert world.slot("r2c0").stage is not S.BLENDING
        assert world.training().site_by_name["r2c0"].seed is None
        while world.slot("r2c0").stage is not S.DORMANT:
            assert not any(prunable(world)), "in cooldown"
            world.step()
        assert world.of_kind(EpochCompleted)[-1].parameters < grown
        world.do("PRUNE", "r2c0", alpha_speed=0)
        assert widths(world) == [3, 6]
        assert world.slot("r2c0").stage in (S.PRUNED, S.EMBARGOED)
        assert world.training().host.parameter_count == parameters
        assert world.slot("r2c0").merged_parameters == 0
        assert world.slot("r2c0").first_merge == -1
        assert world.slot("r2c0").last_merge == -1
        assert world.slot("r2c0").accuracy_at_merge is None
        world.step()
        epoch = world.of_kind(EpochCompleted)[-1]
        assert (epoch.merges, epoch.widths) == ({}, {})
        assert epoch.parameters == parameters
        assert epoch.fossil_parameters == 0
        first, second = life_of(world).seeds
        assert not first.kept
        assert not second.kept
        assert "taken out of its layer from epoch 2 on" in second.end
        changes = world.of_kind(StageChanged)
        shrinks = [
            (c.before, c.after, c.blueprint) for c in changes if c.cause == "shrink"
        ]
        assert shrinks == [
            ("DORMANT", "BLENDING", "widen_half"),
            ("DORMANT", "PRUNED", "widen_whole"),
        ]


def test_the_host_computes_the_same_when_its_units_begin_to_fade() -> None:
    with rig(horizon=14, env=MERGES) as world:
        twice_grown(world)
        training = world.training()
        x = training.task.validation.inputs(0, 50)
        wanted = training.host.eval()(x)
        where = np.array([[False, True, False]])
        world.env.backend.take_out(where)
        site = training.site_by_name["r2c0"]

        def hook(number: int, at: Any) -> Any:
            if training.sites[number] is site and site.seed is not None:
                return at.h + site.seed.eval()(at.source)
            return at.h

        torch.testing.assert_close(training.host.forward_with_hook(x, hook), wanted)


@pytest.mark.parametrize(
    ("slot", "blueprint", "before"),
    [("r0c0", "norm", True), ("r0c0", "norm", False), ("r2c1", "widen_half", False)],
)
def test_units_that_a_seed_uses_are_not_taken_out(
    slot: str, blueprint: str, before: bool
) -> None:
    env = {**MERGES, "one_incubating": False, "at_once": slot == "r0c0"}
    with rig(horizon=20, env=env) as world:
        if before:
            world.do("GERMINATE", slot, blueprint)
        if slot == "r0c0":
            world.do("GERMINATE", "r2c0", "widen_whole")
        else:
            world.grow("r2c0", S.HOLDING, "widen_whole")
            world.do("FOSSILIZE", "r2c0")
        assert world.slot("r2c0").merges == 1
        if not before:
            assert prunable(world)[1]
            world.do("GERMINATE", slot, blueprint)
        assert prunable(world)[1] == before, (
            "a seed keeps to the channels that it has seen"
        )
        world.step()
        world.do("PRUNE", slot, alpha_speed=0)
        assert world.slot(slot).stage is not S.GERMINATED
        assert prunable(world)[1]
        world.do("PRUNE", "r2c0", alpha_speed=0)
        world.step()
        assert widths(world) == [3, 6]


def grow_and_shrink(world: Rig, first: int, last: int, damage: int) -> None:
    actions: dict[int, tuple[Any, ...]] = {
        0: ("GERMINATE", "r2c0", "widen_whole"),
        1: ("GERMINATE", "r2c0", "widen_half"),
        3: ("PRUNE", "r2c0"),
        5: ("GERMINATE", "r2c1", "widen_half"),
        11: ("GERMINATE", "r2c0", "widen_quarter"),
    }
    for epoch in range(first, last):
        if epoch == damage:
            DAMAGE["NaN weight"](world.training())
        world.do(*actions.get(epoch, ("WAIT",)), alpha_speed=5)


@pytest.mark.parametrize(
    ("tier", "stops"),
    slow_except(
        [("native", (4, 11))],
        [("native", (4, 11)), ("native", STOPS), ("eager", STOPS)],
    ),
)
def test_a_host_that_grows_thrice_shrinks_and_is_rolled_back_goes_on_after_a_stop_with_the_same_bits(
    tier: str, stops: tuple[int, ...], tmp_path: Path
) -> None:
    """It stops while units fade, with the slot in cooldown, before and after the rollback, and after the last merge."""
    env = {**MERGES, "one_incubating": False}
    config: dict[str, Any] = {"env": env, "run": {"lanes": 1, "tier": tier}}
    with rig(horizon=14, **config) as world:
        grow_and_shrink(world, 0, 14, damage=10)
        whole = {name: t.clone() for name, t in all_tensors(world.training())}
        observed = world.observation
        assert world.env.state.rollbacks[0] == 1
        assert world.of_kind(EpisodeCompleted)[-1].merges == {"r2c0": 2, "r2c1": 1}
        assert widths(world) == [8, 9]
    for stop in stops:
        with rig(horizon=14, **config) as world:
            grow_and_shrink(world, 0, stop, damage=10)
            saved = copy.deepcopy(world.env.state_dict())
        with rig(horizon=14, **config) as world:
            world.env.load_state_dict(saved)
            grow_and_shrink(world, stop, 14, damage=10)
            for name, tensor in all_tensors(world.training()):
                assert torch.equal(tensor, whole[name]), (stop, name)
            np.testing.assert_array_equal(world.observation, observed)
            network = committed_network(world.training())

    require_exported(network, tmp_path)


def test_a_resumed_host_that_shrinks_to_its_first_layers_has_its_first_sizes() -> None:
    """The sizes of a new host are counted anew, when all hosts of the env have grown."""
    with rig(horizon=6, env=MERGES) as world:
        first = {name: getattr(world.env.offers, name).copy() for name in OF_HOSTS}
        world.do("GERMINATE", "r2c1", "widen_whole")
        saved = copy.deepcopy(world.env.state_dict())
    with rig(horizon=6, env=MERGES) as world:
        world.env.load_state_dict(saved)
        assert (world.env.offers.parameters != first["parameters"]).any()
        world.do("PRUNE", "r2c1", alpha_speed=0)
        for name, sizes in first.items():
            np.testing.assert_array_equal(getattr(world.env.offers, name), sizes, name)


@pytest.mark.parametrize("damage", [3, 4, 9])
def test_a_rollback_restores_the_layers_of_its_snapshot(damage: int) -> None:
    """In the epoch in which units begin to fade, while they do, and after they have gone."""
    env = {**MERGES, "one_incubating": False}
    with rig(horizon=14, env=env, governor={"snapshot_every": 20}) as world:
        grow_and_shrink(world, 0, 3, damage)
        offered = world.env.offers.parameters.copy()
        for epoch in range(3, damage + 1):
            if epoch == damage:
                DAMAGE["NaN weight"](world.training())
            if epoch == 3:
                world.do("PRUNE", "r2c0", alpha_speed=5)
            else:
                world.step()
        assert world.env.state.rolled_back[0]
        assert widths(world) == [9, 6]
        slot = world.slot("r2c0")
        assert (slot.merges, slot.first_merge) == (2, 0)
        assert world.training().host.parameter_count == 277 + slot.merged_parameters
        np.testing.assert_array_equal(world.env.offers.parameters, offered)
        record = world.measurement()
        assert record.committed == record.accuracy
        world.step()
        life = life_of(world)
        assert [seed.kept for seed in life.seeds] == [True, True]
        while world.slot("r2c0").stage is not S.DORMANT:
            world.step()
        assert prunable(world)[1]
