"""`tinystories`: its token files, and the messages if they are not usable."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.config import ConfigError
from esper.data.task import DataOptions, Task
from esper.data.tasks import TASKS, load_task
from esper.data.tinystories import (
    LENGTH,
    VOCABULARY,
    TokenWindows,
)


def sequences(task: Task) -> TokenWindows:
    """The training sequences: a data set, not a split in memory."""
    assert isinstance(task.train, TokenWindows)
    return task.train


def test_token_files_are_memory_mapped(tmp_path: Path) -> None:
    write_bins(tmp_path / "tinystories", tokens=VOCABULARY + 5_000)
    train = sequences(load_task("tinystories", DataOptions(tmp_path)))
    assert isinstance(train.tokens, np.memmap)
    assert len(train) == (VOCABULARY + 5_000 - 1) // LENGTH
    for row in (0, 3, len(train) - 1):
        x, y = train[row]
        assert x.dtype == y.dtype == torch.int64
        assert x.shape == y.shape == (LENGTH,)
        assert int(x[0]) == row * LENGTH % VOCABULARY
        assert torch.equal(y, (x + 1) % VOCABULARY)


@pytest.mark.trap(24)
def test_validation_and_test_are_two_halves(tmp_path: Path) -> None:
    folder = tmp_path / "tinystories"
    write_bins(folder, tokens=2 * (3 * LENGTH + 1))
    task = load_task("tinystories", DataOptions(tmp_path))
    validation, test = (
        set(split.x.flatten().tolist()) | set(split.y.flatten().tolist())
        for split in (task.validation, task.test)
    )
    assert len(task.validation) == len(task.test) == 3
    assert not validation & test
    assert max(validation) < min(test)


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_task("tinystories", DataOptions(folder))
    return str(caught.value)


def test_missing_files_are_one_message_with_instructions(tmp_path: Path) -> None:
    text = refused(tmp_path)
    folder = tmp_path / "tinystories"
    for name in ("train.bin", "validation.bin"):
        assert f"missing: {folder / name}" in text
    for word in ("uint16", "https://", "task.data", "ESPER_DATA"):
        assert word in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"\1\2\3", "has 3 bytes"),
        (
            b"\1\0" * LENGTH,
            f"{LENGTH} tokens; a sequence with its targets needs {LENGTH + 1}",
        ),
        (b"\xff\xff" * 2 * LENGTH, "token 65535; the host's vocabulary has 0 to 50256"),
    ],
)
def test_an_invalid_token_file_is_named(
    content: bytes, message: str, tmp_path: Path
) -> None:
    write_bins(tmp_path / "tinystories")
    (tmp_path / "tinystories" / "train.bin").write_bytes(content)
    text = refused(tmp_path)
    assert str(tmp_path / "tinystories" / "train.bin") in text
    assert message in text


def test_too_few_validation_tokens_are_refused(tmp_path: Path) -> None:
    write_bins(tmp_path / "tinystories")
    np.zeros(2 * LENGTH + 1, dtype="<u2").tofile(
        tmp_path / "tinystories" / "validation.bin"
    )
    assert f"{2 * LENGTH + 2} or more are needed" in refused(tmp_path)


def test_the_preset_is_known_without_its_data() -> None:
    assert "30,044,544" in TASKS["tinystories"].description
    with torch.device("meta"):
        host = TASKS["tinystories"].build_host()
    assert host.parameter_count == 30_044_544
    assert host.slot_names == ("r0c0", "r0c1", "r0c2")


def test_windows_travel_to_another_process_by_their_path(tmp_path: Path) -> None:
    write_bins(tmp_path, tokens=100_000)
    windows = TokenWindows(tmp_path / "train.bin", VOCABULARY, LENGTH)
    sent = pickle.dumps(windows)
    assert len(sent) < 1_000
    there = pickle.loads(sent)
    assert len(there) == len(windows) == 390
    for mine, theirs in zip(windows[5], there[5], strict=True):
        assert torch.equal(mine, theirs)
    x, y = there.batch([5, 0, 5])
    assert torch.equal(x, torch.stack([windows[row][0] for row in (5, 0, 5)]))
    assert torch.equal(y, torch.stack([windows[row][1] for row in (5, 0, 5)]))
    with pytest.raises(IndexError, match="row 390 of 390"):
        there[390]


def write_bins(folder: Path, tokens: int = 5_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "validation"):
        (np.arange(tokens) % VOCABULARY).astype("<u2").tofile(folder / f"{part}.bin")
