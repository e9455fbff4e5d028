"""Slots that a run chooses, and seeds that read a source of their own, through the whole lifecycle of an env."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import esper
from esper.agents.script import ScheduleEntry, ScriptedController
from esper.config import ConfigError
from esper.core.action import STYLES
from esper.core.ramps import BlendOperator
from esper.core.stage import SeedStage as S
from esper.data.digits import load_table
from esper.env.vector_env import GrowthVectorEnv
from esper.files.grown_host import committed_network, export, load_host
from esper.hosts.host import Host
from tests.core_helpers import digits, make_training, rig, tiny_config


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("all",), ("r0c0", "r0c1", "r1c0", "r1c1", "r2c0", "r2c1")),
        (("r2",), ("r2c0", "r2c1")),
        (("c1", "r1c0"), ("r0c1", "r1c0", "r1c1", "r2c1")),
        (("r2c0", "r2c0"), ("r2c0",)),
    ],
)
def test_slots_are_chosen_by_name_row_and_column(
    names: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    training = make_training(tiny_config(env={"slots": names}))
    assert training.host.slot_names == wanted
    assert training.host.parameter_count == make_training().host.parameter_count


def test_a_slot_that_hosts_cannot_have_is_refused_with_the_list() -> None:
    for names, reason in (
        (("r3c0",), "no slot r3c0"),
        (("row",), "no slot row"),
        ((), "name one or more"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"env.slots: .*{reason}.*; possible: r0c0, r0c1, r1c0, r1c1, r2c0, r2c1",
        ):
            digits().new_host(names)


def test_by_default_hosts_have_the_slots_that_read_what_they_add_to() -> None:
    assert digits().new_host().slot_names == ("r0c0", "r0c1", "r1c0", "r1c1")


def test_each_slot_is_offered_the_blueprints_that_fit() -> None:
    with rig(env={"slots": ["r0c0", "r2"]}) as world:
        spec, mask = (
            world.env.action_spec,
            world.info["action_mask"]["slot_blueprint"][0],
        )
        offered = {
            slot: {
                name for name, legal in zip(spec.blueprints, row, strict=True) if legal
            }
            for slot, row in zip(spec.slots, mask.tolist(), strict=True)
        }
    widen = {"widen_quarter", "widen_half", "widen_whole"}
    assert offered["r2c0"] == offered["r2c1"] == widen
    assert offered["r0c0"] == set(spec.blueprints) - widen
    assert len(offered["r0c0"]) == 7


def test_a_schedule_that_plants_where_nothing_fits_is_refused_at_once() -> None:
    entry = ScheduleEntry(epoch=3, op="GERMINATE", slot="r2c0", blueprint="norm")
    with rig(env={"slots": ["r0c0", "r2"]}) as world:
        parts = world.env.action_spec, world.env.layout
    with pytest.raises(ConfigError) as caught:
        ScriptedController([entry], *parts, 1)
    assert str(caught.value) == (
        "schedule, epoch 3: blueprint 'norm' does not fit in slot r2c0, where these do: widen_quarter, widen_half, "
        "widen_whole"
    )


@pytest.mark.parametrize("incubation", ["shadow", "ste"])
def test_a_widening_goes_through_all_stages_and_is_saved_with_its_host(
    incubation: str, tmp_path: Path
) -> None:
    with rig(env={"slots": ["r0c0", "r2c0"], "incubation": incubation}) as world:
        world.grow("r2c0", S.FOSSILIZED, "widen_whole")
        training = world.training()
        assert world.slot("r2c0").parameters == 195
        assert (
            torch.count_nonzero(training.site_by_name["r2c0"].seed.body[-1].weight) > 0
        )  # type: ignore[union-attr, index]
        network = committed_network(training)
        x = training.task.test.inputs(0, 50)
        wanted = network(x)
        found = 100 * float(
            (wanted.argmax(1) == training.task.test.y[:50]).float().mean()
        )
        assert found > 0
    export(network, tmp_path / "host")
    again = load_host(tmp_path / "host", model=digits().build_host())
    assert again.slot_names == ("r0c0", "r2c0")
    assert torch.equal(again(x), wanted)


def test_a_seed_with_a_source_is_added_whatever_the_style_says() -> None:
    with rig(horizon=10, env={"slots": ["r0c0", "r2c0"]}) as world:
        world.do("GERMINATE", "r2c0", "widen_half", tempo=3, style="GATED_GATE")
        planted = world.training().site_by_name["r2c0"].planted
        assert planted is not None
        assert planted.module.operator is BlendOperator.ADD
        assert planted.style.name == "LINEAR_ADD"
        assert world.slot("r2c0").style == STYLES.index("LINEAR_ADD")
        assert world.slot("r2c0").parameters == 130


def test_a_slot_at_which_nothing_can_grow_is_refused_with_the_reason() -> None:
    def build() -> Host:
        model = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 10))
        return esper.graft(model, {"r0c0": "0 -> 2"}, topology="mlp")

    task = replace(load_table(), build_host=build)
    wanted = (
        "slot r0c0: no blueprint fits between its source and its sink: between the layers is a LayerNorm, in which "
        "units depend on each other; a LoRA changes the weights of one layer"
    )
    with pytest.raises(ConfigError) as caught:
        GrowthVectorEnv(task, tiny_config())
    assert str(caught.value) == wanted
