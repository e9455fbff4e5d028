"""`esper run` with an agent that learns: its output, and resuming, comparing and playing the agent."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.files import checkpoint
from tests.cli.child import start
from tests.cli.conftest import SIMULATED, TINY
from tests.telemetry.sample_events import read_events

Esper = Callable[..., Any]

RUN = ("run", *SIMULATED, *("--set", "ppo.width=16", "--set", "ppo.update_epochs=1"))
RUN += ("--set", "run.evaluation_pairs=10", "--rounds", "2", "--seed", "3")


def until(child: subprocess.Popen[str], beginning: str) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(beginning):
            return
    pytest.fail(f"no line {beginning!r} came: {child.communicate()[1]}")


def test_an_agent_is_the_default_and_what_it_learned_is_compared(esper: Esper) -> None:
    found = esper(*RUN, "--out", "mine")
    assert (found.code, found.err) == (0, "")
    lines = found.out.splitlines()
    assert lines[0].startswith("ppo will grow 4 hosts on planted: 2 rounds of 2, ")
    assert [line.split("  ")[0] for line in lines if line.startswith("round ")] == [
        "round 1/2",
        "round 2/2",
    ]
    assert sum(line.startswith("  learned: KL ") for line in lines) == 2
    assert (
        sum(line.startswith("comparing, round ") for line in lines) == 6 * 5
    )  # arms, rounds of at most 2 hosts
    first = next(
        i
        for i, line in enumerate(lines)
        if line.startswith("Test accuracy of 10 hosts grown by ppo: ")
    )
    *_, end = read_events("mine/events.jsonl")
    for told, line in zip(
        end["comparisons"], lines[first + 3 : first + 8], strict=True
    ):
        match = re.fullmatch(
            rf"  {told['reference']} +\d+\.\d\d %   +[+-]\d+\.\d\d pp, (?:\S+ to \S+|no interval): "
            r"(better|worse|no evidence of a difference|no verdict)(?:, all .* copies of .*)?",
            line,
        )
        assert match
        winner = told["verdict"].partition(" is better")[0].partition(":")[0]
        assert match[1] == {"ppo": "better", told["reference"]: "worse"}.get(
            winner, winner
        )


@pytest.mark.finding("M12")
def test_an_error_before_the_first_checkpoint_proposes_no_resume(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_training: Any, **_how: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr("esper.training.execution.workers.train_epoch", breaks)
    found = esper("run", *TINY, "--out", "mine")
    assert found.code == 1
    assert "Traceback" not in found.err
    assert "--resume" not in found.err
    assert "its events so far are in mine" in found.err


def test_a_full_disk_ends_the_run_with_a_message(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous checkpoint is kept, and the run resumes from it once there is space."""

    def full(_folder: Path, content: bytes, keep: bool) -> None:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(content)
        real(_folder, content, keep)

    written: list[bytes] = []
    real = checkpoint.write
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        found = esper(*RUN, "--set", "run.evaluation_pairs=1", "--out", "mine")
    assert found.code == 1
    assert found.err.splitlines() == [
        "Error: [Errno 28] No space left on device",
        "Progress was saved. To continue: esper run --resume mine",
    ]
    assert checkpoint.read(Path("mine"))["round"] == 1
    resumed = esper("run", "--resume", "mine")
    assert (resumed.code, resumed.err) == (0, "")
    lines = resumed.out.splitlines()
    assert lines[0] == "resumed after round 1/2"
    assert not any(line.startswith(("baseline", "round 1/2")) for line in lines)
    again = esper("run", "--resume", "mine")
    assert (again.code, again.err) == (
        2,
        "Error: mine is finished: all 2 rounds were played and compared\n",
    )


@pytest.mark.parametrize(
    "other",
    [
        ("--controller", "none"),
        ("--out", "there"),
        ("--task", "digits"),
        ("--envs", "2"),
        ("--set", "run.rounds=9"),
        ("--track", "tensorboard"),
    ],
)
def test_resume_takes_no_other_option(esper: Esper, other: tuple[str, str]) -> None:
    found = esper("run", "--resume", "mine", *other)
    assert found.code == 2
    assert found.err == (
        "Error: --resume FOLDER continues the run with the settings it was started with; only the same user-defined "
        "--task and --controller, and options of processes, can be given with it\n"
    )
    assert list(Path().iterdir()) == []


def test_a_folder_that_cannot_be_resumed_is_named(esper: Esper) -> None:
    Path("empty").mkdir()
    for folder in ("gone", "empty"):
        found = esper("run", "--resume", folder)
        assert found.code == 2
        assert found.err.startswith(f"Error: no checkpoint at {folder}")
    assert [path.name for path in Path().rglob("*")] == ["empty"]


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_printing_and_not_the_run(
    tmp_path: Path,
) -> None:
    """The reader is one like `head -1`."""
    child = start(*RUN, "--out", "mine", folder=tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline()
    child.stdout.close()
    assert child.wait() == 1
    assert [
        event["event"] for event in read_events(tmp_path / "mine" / "events.jsonl")
    ][-1] == "RunCompleted"
    assert child.stderr is not None
    assert "Traceback" not in child.stderr.read()
    child.stderr.close()
