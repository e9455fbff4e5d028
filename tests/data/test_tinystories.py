"""`tinystories`: from texts with a tokenizer, from token files, and the messages when neither is usable."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.config import ConfigError
from esper.data.task import DataOptions, Task
from esper.data.tasks import TASKS, load_task
from esper.data.tinystories import (
    END,
    LENGTH,
    MEASURED,
    VOCABULARY,
    TokenWindows,
    token_files,
    write_tokens,
)

WORDS = ("once", "upon", "a", "time", "there", "was", "cat", "dog", ".")


def write_tokenizer(folder: Path, *more: str, end: str = END) -> Path:
    """A tokenizer.json of whole words: token 0 is the end of a story, 1 an unknown word, then WORDS and ``more``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {word: i for i, word in enumerate((end, "?", *WORDS, *more))}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_texts(folder: Path, stories: int = 700) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", stories), ("validation", stories)):
        texts = [
            f"\nonce upon a time there was a {'cat' if i % 2 else 'dog'}.\n"
            for i in range(count)
        ]
        (folder / f"{part}.txt").write_text(END.join(texts), encoding="utf-8")


def test_texts_become_token_files_and_a_task(tmp_path: Path) -> None:
    folder = tmp_path / "tinystories"
    write_tokenizer(folder)
    write_texts(folder)
    task = load_task("tinystories", DataOptions(tmp_path))
    assert task.classes == VOCABULARY
    cat, dog = [2, 3, 4, 5, 6, 7, 4, 8, 10, 0], [2, 3, 4, 5, 6, 7, 4, 9, 10, 0]
    assert np.fromfile(folder / "train.bin", dtype="<u2").tolist() == (dog + cat) * 350
    names = "tokenizer.json train.bin train.txt validation.bin validation.txt"
    assert sorted(file.name for file in folder.iterdir()) == names.split()
    x, y = sequences(task)[1]
    stream = (dog + cat) * 350
    assert x.tolist() == stream[LENGTH : 2 * LENGTH]
    assert y.tolist() == stream[LENGTH + 1 : 2 * LENGTH + 1]


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


def test_validation_is_small_and_always_the_same(tmp_path: Path) -> None:
    write_bins(tmp_path / "tinystories", tokens=40_000)
    first, second = (load_task("tinystories", DataOptions(tmp_path)) for _ in range(2))
    assert len(first.validation) == len(first.test) == MEASURED
    assert torch.equal(first.validation.x, second.validation.x)
    assert torch.equal(first.test.y, second.test.y)


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_task("tinystories", DataOptions(folder))
    return str(caught.value)


def test_missing_files_are_one_message_with_instructions(tmp_path: Path) -> None:
    text = refused(tmp_path)
    folder = tmp_path / "tinystories"
    for name in ("train.txt", "validation.txt", "tokenizer.json"):
        assert f"missing: {folder / name}" in text
    for word in ("train.bin", "uint16", "https://", "task.data", "ESPER_DATA"):
        assert word in text


def test_only_needed_files_are_reported_missing(tmp_path: Path) -> None:
    folder = tmp_path / "tinystories"
    write_bins(folder)
    (folder / "validation.bin").unlink()
    write_tokenizer(folder)
    text = refused(tmp_path)
    assert f"missing: {folder / 'validation.txt'}" in text
    assert "missing: " + str(folder / "train") not in text
    assert "missing: " + str(folder / "tokenizer.json") not in text


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


def test_a_text_newer_than_its_tokens_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tinystories"
    write_bins(folder)
    write_texts(folder)
    os.utime(folder / "train.txt", (2e9, 2e9))
    os.utime(folder / "train.bin", (1e9, 1e9))
    assert "train.txt is newer than" in refused(tmp_path)
    os.utime(folder / "train.txt", (1e8, 1e8))
    os.utime(folder / "validation.txt", (1e8, 1e8))
    assert len(token_files(folder)[0].tokens) == 5_000


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "tinystories"
    write_texts(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert f"{folder / 'tokenizer.json'} is not a tokenizer.json" in refused(tmp_path)
    write_tokenizer(folder, end="<end>")
    assert f"has no token {END}" in refused(tmp_path)


def test_a_tokenizer_with_more_tokens_than_the_host_is_refused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    write_texts(tmp_path)
    with pytest.raises(
        ConfigError, match="has 11 tokens; the host's vocabulary has 10"
    ):
        write_tokens(
            tmp_path / "train.txt", tokenizer, tmp_path / "train.bin", vocabulary=10
        )
    assert not (tmp_path / "train.bin").exists()


def test_a_text_that_is_not_utf8_leaves_no_tokens_behind(tmp_path: Path) -> None:
    folder = tmp_path / "tinystories"
    write_tokenizer(folder)
    write_texts(folder)
    (folder / "train.txt").write_bytes(b"once upon \xff")
    assert f"{folder / 'train.txt'} is not UTF-8" in refused(tmp_path)
    assert not list(folder.glob("train.bin*"))


def test_stories_are_whole_wherever_a_chunk_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = write_tokenizer(tmp_path)
    (tmp_path / "t.txt").write_text(
        f"once upon{END}{END} \n {END}a time .{END}was", encoding="utf-8"
    )
    for size in (1, 2, 5, 1_000):
        monkeypatch.setattr("esper.data.tinystories.READ", size)
        write_tokens(tmp_path / "t.txt", tokenizer, tmp_path / "t.bin", VOCABULARY)
        tokens = np.fromfile(tmp_path / "t.bin", dtype="<u2").tolist()
        assert tokens == [2, 3, 0, 4, 5, 10, 0, 7, 0], size


def test_the_preset_is_known_without_its_data() -> None:
    assert "30,044,544" in TASKS["tinystories"].description
    with torch.device("meta"):
        host = TASKS["tinystories"].build_host()
    assert host.parameter_count == 30_044_544
    assert host.slot_names == ("r0c0", "r0c1", "r0c2")


def test_tokens_above_half_of_uint16_stay_positive(tmp_path: Path) -> None:
    tokens = np.full(LENGTH + 1, VOCABULARY - 1, dtype="<u2")
    tokens.tofile(tmp_path / "train.bin")
    x, y = TokenWindows(tmp_path / "train.bin", VOCABULARY, LENGTH)[0]
    assert x.tolist() == y.tolist() == [50_256] * LENGTH


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
