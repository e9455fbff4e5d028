"""The command as typed, in this process: `main()` with its exit codes and its output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from esper.cli.main import main


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


Esper = Callable[..., Finished]

TINY = (
    "--controller",
    "schedule",
    "--envs",
    "2",
    "--episode-length",
    "3",
    "--set",
    "task.samples_per_epoch=128",
    "--set",
    "env.baseline_episodes=1",
)
TWO_EPOCHS = (*TINY[2:5], "2", "--set", "task.samples_per_epoch=64", *TINY[-2:])
"""Options of a comparison of two hosts in training."""
SIMULATED = ("--task", "planted", "--envs", "2", "--episode-length", "4")
MINE = """
from dataclasses import replace
from esper.data.tasks import load_task


def make_task():
    open("executed", "a").write("x")
    return replace(load_task("digits"), learning_rate=0.01)
"""
TASK = "mine.py:make_task"


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons draw no plots, which take most of the time of a small one."""
    monkeypatch.setattr("esper.compare.table.save_plots", lambda *_: [])


@pytest.fixture
def esper(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Esper:
    """``esper("run", "--envs", "2")`` in an empty working directory; an exception that leaves main() fails the test."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["esper", *arguments])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return Finished(code, printed.out, printed.err)

    return call


def executed() -> int:
    """Number of calls of the user's function since the last check."""
    file = Path("executed")
    count = len(file.read_text()) if file.exists() else 0
    file.unlink(missing_ok=True)
    return count
