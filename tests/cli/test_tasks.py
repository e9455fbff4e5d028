"""`esper tasks`, and tasks of commands: missing data, and tasks in a file of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from esper.agents.spec import NAMES
from esper.core.blueprints import BLUEPRINTS
from esper.data.names import SIMULATED
from esper.data.tasks import TASKS
from esper.run.rollout import Collector
from tests.cli.conftest import MINE, TASK, TWO_EPOCHS, Esper, executed

pytestmark = pytest.mark.usefixtures("no_plots")


def test_tasks_lists_all_without_loading_data(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_: Any) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr("esper.data.images.read_splits", touched)
    monkeypatch.setattr("esper.data.text.help_texts", touched)
    found = esper("tasks")
    assert found.code == 0
    for name in (*TASKS, *SIMULATED, "path.py:function"):
        assert any(line.startswith(f"  {name} ") for line in found.out.splitlines()), (
            name
        )
    for name in (*BLUEPRINTS.names("cnn"), *NAMES):
        assert name in found.out


@pytest.mark.parametrize("task", ["cifar10"])
def test_missing_data_is_a_message_and_nothing_is_started(
    esper: Esper, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This machine may have it.
    monkeypatch.setattr("esper.data.images.SYSTEM", Path("no_package"))
    found = esper("run", "--task", task, "--set", "task.data=nowhere", "--out", "out")
    assert found.code == 2
    assert "missing: nowhere/" in found.err
    assert "Traceback" not in found.err
    assert not Path("out").exists()
    assert not Path("nowhere").exists()


def test_an_unknown_task_lists_the_known_ones_and_the_form_of_a_users_task(
    esper: Esper,
) -> None:
    found = esper("run", "--task", "cifar11", "--out", "out")
    assert found.code == 2
    for word in ("'cifar11'", *TASKS, *SIMULATED, "path.py:function"):
        assert word in found.err


def test_resuming_a_users_task(esper: Esper, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.py").write_text(MINE)
    arguments = (
        "run",
        "--task",
        TASK,
        "--controller",
        "random",
        "--rounds",
        "1",
        "--out",
        "out",
    )

    def interrupted(self: Collector) -> Any:
        raise OSError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "play", interrupted)
        found = esper(*arguments, *TWO_EPOCHS)
    assert found.code == 1
    assert f"esper run --resume out --task {TASK}" in found.err
    executed()

    refused = esper("run", "--resume", "out")
    assert refused.code == 2
    assert f"name it: --task {TASK}" in refused.err
    other = esper("run", "--resume", "out", "--task", "mine.py:another")
    assert other.code == 2
    assert "a run of the task" in other.err
    assert executed() == 0
    found = esper("run", "--resume", "out", "--task", TASK)
    assert (found.code, found.err) == (0, "")
    assert executed() == 1


def test_a_users_config_may_name_a_users_task(esper: Esper) -> None:
    Path("mine.py").write_text(MINE)
    Path("mine.toml").write_text(
        f'[task]\nname = "{TASK}"\n[run]\ncontroller = "random"\nrounds = 1\n'
    )
    assert esper("run", "--config", "mine.toml", *TWO_EPOCHS).code == 0
    assert executed() == 1
    assert [
        folder.name.startswith("mine-random-") for folder in Path("runs").iterdir()
    ] == [True]
