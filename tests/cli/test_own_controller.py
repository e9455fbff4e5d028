"""Controllers in a user's file on the command line: run, resumed, compared and evaluated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Esper, executed

pytestmark = pytest.mark.usefixtures("no_plots")

MINE = """
from esper.agents.heuristic import HeuristicController


def make_controller(env):
    open("executed", "a").write("x")
    return HeuristicController(env.action_spec, env.layout, env.num_envs)
"""
NAME = "mine.py:make_controller"
HOSTS = ("--task", "planted", "--envs", "2", "--episode-length", "8")


@pytest.fixture(autouse=True)
def file(esper: Esper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in the working directory; what loading it adds to ``sys.path`` is undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("mine.py").write_text(MINE)


def test_a_run_plays_an_own_controller_and_prints_the_resume_command(
    esper: Esper,
) -> None:
    found = esper("run", "--controller", NAME, *HOSTS)
    assert (found.code, found.err, executed()) == (0, "", 1)
    assert [
        folder.name.startswith("planted-mine-") for folder in Path("runs").iterdir()
    ] == [True]
    assert f"hosts grown by {NAME}" in found.out
    assert f"--arm {NAME} --arm heuristic" in found.out


def test_eval_plays_it_once_beside_hosts_left_alone(esper: Esper) -> None:
    found = esper(
        "eval",
        NAME,
        "--task",
        "planted",
        "--pairs",
        "2",
        "--set",
        "env.episode_length=8",
    )
    assert (found.code, executed()) == (0, 1)
    assert f"comparing, round 1/1: {NAME}, test accuracy" in found.out
    assert "greedy" not in found.out
    refused = esper("eval", NAME, "--save", "mine.safetensors")
    assert (refused.code, executed()) == (2, 0)
    assert "--save saves a trained agent" in refused.err
