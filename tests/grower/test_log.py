"""A loop's run folder holds the events of a run with one host, and the commands read it."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from esper.cli.group import group
from esper.config import ConfigError
from esper.show.read import open_run
from esper.telemetry import event as events
from tests.grower.loops import LENIENT, Loop, scores, weights


def lines(folder: Path) -> list[dict[str, Any]]:
    """The log without what may differ between two loops of one seed."""
    volatile = ("time", "folder", "seconds", "epochs_per_second", "phase_seconds")
    found = [
        json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()
    ]
    return [
        {name: value for name, value in line.items() if name not in volatile}
        for line in found
    ]


def grown(folder: Path, early: bool = False) -> Loop:
    loop = Loop(folder=folder, early=early).run()
    loop.grower.finish()
    return loop


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished loop, with its report."""
    folder = tmp_path_factory.mktemp("loop") / "a"
    grown(folder)
    reported = CliRunner().invoke(group, ["report", str(folder)])
    assert reported.exit_code == 0, reported.output
    return folder


def test_the_folder_of_a_loop_reads_as_a_finished_run(finished: Path) -> None:
    run = open_run(finished)
    assert run.finished
    assert run.all_problems() == []
    assert [epoch.epoch for epoch in run.of(events.EpochCompleted)] == list(
        range(1, 14)
    )
    assert [change.after for change in run.of(events.StageChanged)][-1] == "FOSSILIZED"
    shown = CliRunner().invoke(group, ["show", str(finished)])
    assert shown.exit_code == 0
    assert "task Net" in shown.output
    assert "finished: 1 round played\n" in shown.output
    assert "Nothing was compared" in shown.output
    assert re.search(r"a validation score of 0\.\d+\.", shown.output)  # in its unit
    assert "%" not in shown.output.partition("time ")[0]
    assert "mlp_small" in (finished / "report.html").read_text()


def test_a_loop_is_not_compared_with_its_own_model_without_seeds(
    finished: Path, tmp_path: Path
) -> None:
    """That model leans on its seeds, so their difference is no gain; only scores that are passed are a baseline."""
    known = Loop(folder=tmp_path / "b", baseline=[0.25] * 14).run()
    known.grower.finish()
    runner = CliRunner()
    assert runner.invoke(group, ["report", str(tmp_path / "b")]).exit_code == 0
    folders = {"a": finished, "b": tmp_path / "b"}
    shown = {}
    pages = {}
    for name, folder in folders.items():
        shown[name] = runner.invoke(group, ["show", str(folder)]).output
        pages[name] = (folder / "report.html").read_text()
    assert "baseline" not in shown["a"]
    assert "without growth" not in pages["a"]
    assert "baseline 0.2500." in shown["b"]
    assert "without growth" in pages["b"]
    (curve,) = open_run(tmp_path / "b").of(events.BaselineMeasured)
    assert curve.accuracy == (25.0,) * 14


def test_a_folder_that_is_not_empty_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    loop = Loop(folder=tmp_path)
    before = weights(loop.model)
    with pytest.raises(ConfigError, match="is not empty"):
        loop.train()
    assert all(
        (weights(loop.model)[name] == value).all() for name, value in before.items()
    )


@pytest.mark.parametrize(
    ("epochs", "early"), [pytest.param(0, False, marks=pytest.mark.slow), (6, True)]
)
def test_a_resumed_loop_continues_its_log(
    tmp_path: Path, epochs: int, early: bool
) -> None:
    """Events after the saved state are logged again, once."""
    grown(tmp_path / "whole", early)
    half = Loop(folder=tmp_path / "half", early=early).run(epochs)
    if not epochs:
        scores(half.model)  # a pass that makes the folder
    # Copied, as a file would be: an optimizer's state refers to its tensors.
    model, grower, optimizer = copy.deepcopy(
        (half.model.state_dict(), half.grower.state_dict(), half.optimizer.state_dict())
    )
    half.run(2)
    other = Loop(folder=tmp_path / "half")
    other.model.load_state_dict(model)
    other.grower.load_state_dict(grower)
    other.optimizer.load_state_dict(optimizer)
    other.epoch = epochs
    other.run()
    other.grower.finish()
    whole, resumed = lines(tmp_path / "whole"), lines(tmp_path / "half")
    again = [i for i, line in enumerate(resumed) if line["event"] == "RunResumed"]
    assert len(again) == 1
    del resumed[again[0] : again[0] + 2]  # and the score, which is defined again
    assert resumed == whole
    assert open_run(tmp_path / "half").all_problems() == []


def test_a_rollback_is_logged(tmp_path: Path) -> None:
    loop = Loop(folder=tmp_path / "a", governor=True).run(2)
    loop.train()
    loop.grower.step(lambda _model: math.nan)
    assert [
        event.reason for event in open_run(tmp_path / "a").of(events.GovernorRollback)
    ] == ["not finite"]


def test_the_level_says_what_a_loop_reports_and_changes_none_of_its_steps() -> None:
    steps = []
    waits = []
    for level in ("minimal", "normal", "debug"):
        told: list[events.Event] = []
        config = LENIENT.with_values(telemetry={"level": level})
        loop = Loop(config=config, callbacks=[told.append]).run()
        steps.append(list(map(str, loop.steps)))
        assert bool(told) == (level != "minimal")
        actions = [event for event in told if isinstance(event, events.ActionTaken)]
        waits.append(sum(action.op == "WAIT" for action in actions))
    assert steps[0] == steps[1] == steps[2]
    assert waits[:2] == [0, 0]
    assert waits[2] > 0
