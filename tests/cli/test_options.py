"""Options that several commands share, and the config that they make."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.conftest import SIMULATED
from tests.telemetry.sample_events import read_events


def test_without_out_the_folder_is_named_after_task_and_controller(
    esper: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "late.toml").write_text(
        '[[action]]\nepoch = 2\nop = "PRUNE"\nslot = "r0c0"\n'
    )
    found = esper(
        "run", *SIMULATED, "--rounds", "1", "--controller", "schedule:late.toml"
    )
    assert found.code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"planted-late-\d{8}-\d{6}", folder.name)
    assert f"run folder: {Path('runs') / folder.name}" in found.out


def test_a_flag_wins_over_set_and_set_over_the_file(
    esper: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text(
        "[run]\nseed = 1\nrounds = 1\n[env]\nn_envs = 7\nepisode_length = 9\n"
    )
    esper(
        "run",
        "--config",
        "c.toml",
        *SIMULATED,
        "--controller",
        "random",
        "--set",
        "env.n_envs=5",
        "--set",
        "run.seed=4",
        "--out",
        "mine",
    )
    begin = next(read_events("mine/events.jsonl"))
    assert (
        begin["rounds"],
        begin["seed"],
        begin["n_envs"],
        begin["episode_length"],
    ) == (1, 4, 2, 4)
