"""`esper demo`: a whole run of the advisor, from the parts of `esper run`."""

from __future__ import annotations

import pytest

from esper.cli import demo
from esper.cli.group import group
from esper.config import TrainingConfig
from tests.cli.conftest import Esper


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with two hosts of four epochs."""
    whole = demo.configuration

    def smaller(seed: int) -> TrainingConfig:
        env = {"n_envs": 2, "episode_length": 3, "baseline_episodes": 1}
        return whole(seed).with_values(
            run={"rounds": 1}, env=env, task={"samples_per_epoch": 64}
        )

    monkeypatch.setattr(demo, "configuration", smaller)


@pytest.mark.usefixtures("small")
def test_the_demo_prints_its_results_and_the_next_commands(esper: Esper) -> None:
    found = esper("demo", "--out", "runs/a demo", "--seed", "3")
    assert found.code == 0
    lines = found.out.splitlines()
    assert lines[0].startswith("The advisor widens 16 small networks")
    assert any(line.startswith("advisor will grow 2 hosts on digits") for line in lines)
    assert any(line.startswith("The best of 2 hosts") for line in lines)
    assert any(
        line.startswith("Test accuracy of 2 hosts grown by advisor") for line in lines
    )
    assert any(line.startswith("In short, too few hosts to tell") for line in lines)
    assert "  esper report 'runs/a demo'" in lines


def test_the_demo_refuses_a_folder_that_is_not_empty(esper: Esper) -> None:
    found = esper("demo", "--out", ".", "--seed", "-1")
    assert found.code == 2
    assert group.get_command(None, "demo") is demo.command  # type: ignore[arg-type]
