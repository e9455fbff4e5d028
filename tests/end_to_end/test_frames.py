"""Few frames lie between the command and a training step."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

import esper
from esper.cli.group import group
from esper.env.no_growth import FIRST_INDEX
from esper.training import step
from esper.training.host_training import HostTraining

PACKAGE = Path(esper.__file__).parent
MAX_FRAMES = 14


def own_frames(stack: traceback.StackSummary) -> list[str]:
    return [
        f"{Path(frame.filename).name}:{frame.name}"
        for frame in stack
        if PACKAGE in Path(frame.filename).parents
    ]


def test_few_frames_lie_between_the_command_and_a_training_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.main_thread().ident
    assert main is not None
    ways: list[list[str]] = []
    train_step = step.train_step

    def noted(training: HostTraining, *rest: Any) -> None:
        if training.index < FIRST_INDEX and not ways:  # not a host of the baseline
            waiting = own_frames(traceback.extract_stack(sys._current_frames()[main]))
            working = own_frames(traceback.extract_stack())
            ways.append([*waiting, *working, "step.py:train_step"])
        train_step(training, *rest)

    monkeypatch.setattr(step, "train_step", noted)
    sizes = [
        "run.tier=eager",
        "env.n_envs=1",
        "env.episode_length=1",
        "env.baseline_episodes=1",
        "task.samples_per_epoch=64",
    ]
    settings = [part for size in sizes for part in ("--set", size)]
    arguments = [
        "run",
        "--controller",
        "heuristic",
        "--rounds",
        "1",
        "--out",
        str(tmp_path / "run"),
        *settings,
    ]
    group.main(arguments, standalone_mode=False)
    (way,) = ways
    assert way[0] == "run.py:command"
    assert len(way) <= MAX_FRAMES, "\n".join(way)
