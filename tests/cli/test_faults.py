"""A fault ends a run with one message and an exit code, and completed work is kept."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from esper.files import checkpoint
from esper.files import run_folder as folder
from esper.training.execution import workers
from esper.training.host_training import HostTraining
from tests.cli.conftest import SIMULATED, Esper, Finished
from tests.run.run_helpers import learned_state

TINY = (
    *(
        "--controller",
        "random",
        "--envs",
        "2",
        "--episode-length",
        "2",
        "--rounds",
        "2",
        "--out",
        "r",
    ),
    *("--set", "task.samples_per_epoch=64", "--set", "env.baseline_episodes=1"),
)


FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


STREAM = """
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import Dataset
from esper.data.tasks import load_task

SPLIT = load_task("digits").train


class Rows(Dataset):
    def __len__(self):
        return len(SPLIT)

    def __getitem__(self, row):
        x, y = SPLIT.x[row], SPLIT.y[row]
        if Path("r/checkpoint.pt").exists() and not Path("healed").exists():
            FAULT
        return x, y


def make_task():
    return replace(load_task("digits"), train=Rows(), workers=1)
"""


FAULTS = {
    "worker": (
        "os.kill(os.getpid(), 9)",
        "envs 0, 1, epoch 0, batch 0: .*a worker died",
    ),
    "image": (
        "x = x * float('nan')",
        r"env 0, epoch 0, batch 0: .*env 0, row \d+: its inputs are not finite",
    ),
    "shape": (
        "x = x[:, 1:]",
        r"env 0, epoch 0, batch 0: .*inputs torch.float32 of shape \(1, 7, 8\).*; expected .*8, 8",
    ),
    "label": (
        "y = y + 10",
        r"env 0, epoch 0, batch 0: .*row \d+: target 1\d is not between 0 and 9",
    ),
    "row": (
        "raise OSError('the disk is gone')",
        r"env 0, epoch 0, batch 0: .*row \d+: OSError: the disk is gone",
    ),
}


def plain(finished: Finished, code: int) -> str:
    """The error message, after checking the exit code and that there is no traceback."""
    assert finished.code == code, finished.err
    assert "Traceback" not in finished.err + finished.out
    return finished.err


@pytest.mark.finding("M12")
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_failing_data_ends_the_run_which_resumes_after_a_repair(
    esper: Esper, fault: str
) -> None:
    statement, words = FAULTS[fault]
    Path("mine.py").write_text(STREAM.replace("FAULT", statement))
    said = plain(esper("run", "--task", "mine.py:make_task", *TINY), 1)
    assert re.search(words, said.replace("\n", " ")), said
    assert "esper run --resume r --task mine.py:make_task" in said
    assert checkpoint.read(Path("r"))["round"] == 0
    Path("healed").touch()
    again = esper("run", "--resume", "r", "--task", "mine.py:make_task")
    assert again.code == 0, again.err
    assert (
        esper(
            "run", "--task", "mine.py:make_task", *TINY[:-6], "--out", "s", *TINY[-4:]
        ).code
        == 0
    )
    assert learned_state(Path("r")) == learned_state(Path("s"))  # nothing was spoiled


@pytest.mark.finding("M12")
def test_a_shortage_of_memory_ends_the_run_with_advice_and_nothing_is_lost(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = workers.train_epoch

    def limited(env: HostTraining, cancelled: Any) -> None:
        if env.episode == 1:
            raise RuntimeError(FULL)
        train(env, cancelled)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "train_epoch", limited)
        said = plain(esper("run", *TINY), 1)
    assert re.search(r"env 0, epoch 0, batch \d+: RuntimeError: .*can't allocate", said)
    assert "--set task.micro_batches=2" in said
    assert "esper run --resume r" in said
    assert checkpoint.read(Path("r"))["round"] == 1
    plain(esper("run", "--resume", "r"), 0)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may become larger than ``size`` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.finding("M12")
@pytest.mark.slow
def test_on_a_full_disk_the_old_checkpoint_stays_and_the_log_is_dropped(
    esper: Esper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two runs whose files may not grow: one that loses only its log, one that cannot write its checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(workers, "train_epoch", stop_in_last_round(workers.train_epoch))
        assert esper("run", *TINY, "--rounds", str(MANY)).code == 130
    before = (Path("r") / checkpoint.NAME).read_bytes()
    log = (Path("r") / folder.EVENTS).stat().st_size
    assert len(before) < log

    with largest_file(len(before) - 1):
        found = esper("run", "--resume", "r")
    said = plain(found, 1)
    assert re.search(r"Error: \[Errno 27\] File too large: '?r/checkpoint\.pt", said), (
        said
    )
    assert "esper run --resume r" in said
    assert "telemetry sink JsonlSink failed and was dropped" in caplog.text
    assert (Path("r") / checkpoint.NAME).read_bytes() == before
    assert not list(Path("r").glob("*.part"))

    with largest_file(log - 1):
        found = esper("run", "--resume", "r")
    plain(found, 0)
    assert "Telemetry lost: JsonlSink failed" in found.out
    assert checkpoint.read(Path("r"))["finished"]


MANY = 12


"""Rounds after which the log is larger than a checkpoint."""


def stop_in_last_round(train: Any) -> Any:
    def stopping(env: HostTraining, cancelled: Any) -> None:
        if env.episode == MANY - 1 and env.index == 0:
            raise KeyboardInterrupt
        train(env, cancelled)

    return stopping


@pytest.mark.finding("M12")
@pytest.mark.parametrize("out", ["/proc/r", "a_file/r"])
def test_a_folder_that_cannot_be_written_is_wrong_input(esper: Esper, out: str) -> None:
    """The first is closed even to root."""
    Path("a_file").touch()
    for command in (
        ("run", *SIMULATED, "--controller", "none", "--out", out),
        ("compare", *SIMULATED, "--arm", "random", "--arm", "none", "--out", out),
    ):
        found = esper(*command)
        said = plain(found, 2)
        assert f"{out} cannot be written: " in said
        assert said.rstrip().endswith("give another folder")
        assert "checkpoint" not in said + found.out


@pytest.mark.finding("M12")
def test_a_folder_that_may_only_be_read_is_wrong_input(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write to it anyway, so the system's answer is replaced."""
    Path("r").mkdir()

    def refuse(path: Path, _content: bytes) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(folder, "write_atomic", refuse)
    said = plain(esper("run", *SIMULATED, "--controller", "none", "--out", "r"), 2)
    assert (
        "run folder r cannot be written: Permission denied; give another folder" in said
    )
    assert not list(Path("r").iterdir())


def test_help_lists_the_exit_codes(esper: Esper) -> None:
    told = " ".join(esper("--help").out.split())
    for words in (
        "0 done",
        "1 an error while running",
        "2 invalid input",
        "130 interrupted",
    ):
        assert words in told
