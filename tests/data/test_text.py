"""Text as a task: its vocabulary and its sizes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from esper.config import ConfigError
from esper.data.split import Split
from esper.data.task import Task
from esper.data.tasks import build_host, load_task
from esper.data.text import (
    LENGTH,
    UNKNOWN,
    chars_parts,
    code_parts,
    encode,
    help_texts,
    source_files,
    vocabulary,
)


@cache
def chars() -> Task:
    return load_task("chars")


def decode(tokens: torch.Tensor) -> str:
    """The text of tokens of the training part's vocabulary."""
    characters = sorted(set(chars_parts()[0]))
    return "".join(
        characters[token - 1] if token else "\ufffd" for token in tokens.tolist()
    )


@pytest.mark.trap(24)
def test_the_parts_are_disjoint_by_position_and_together_they_are_the_text() -> None:
    parts = chars_parts()
    assert "".join(parts) == help_texts()
    total = len(help_texts())
    assert [len(part) / total for part in parts] == [
        pytest.approx(share, abs=0.001) for share in (0.8, 0.1, 0.1)
    ]


def test_the_vocabulary_is_the_training_characters_and_one_unknown() -> None:
    train = chars_parts()[0]
    tokens = vocabulary(train)
    assert chars().classes == len(tokens) + 1 == len(set(train)) + 1
    assert UNKNOWN not in encode(train, tokens)
    assert sorted(set(encode(train, tokens).tolist())) == list(
        range(1, len(tokens) + 1)
    )
    assert encode("oh no", vocabulary("hello")).tolist() == [4, 2, UNKNOWN, UNKNOWN, 4]


def test_windows_spell_the_text_and_none_crosses_a_border() -> None:
    parts = chars_parts()
    tokens = vocabulary(parts[0])
    for part, split in ((parts[0], chars().train), (parts[2], chars().test)):
        spelled = split.x.flatten()
        whole = encode(part, tokens)
        assert torch.equal(spelled, whole[: len(spelled)])
        assert torch.equal(split.y.flatten(), whole[1 : len(spelled) + 1])
        assert len(part) - len(spelled) <= LENGTH
    validation = chars().validation
    for x, y in zip(validation.x[::16], validation.y[::16], strict=True):
        assert decode(x) + decode(y[-1:]) in parts[1]


def test_targets_are_the_next_tokens() -> None:
    split = Split.of_text(torch.arange(10), 3)
    assert split.x.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert split.y.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert (
        len(Split.of_text(torch.arange(9), 3)) == 2
    )  # the last window would want a tenth token
    with pytest.raises(ValueError, match="3 tokens make no sequence of 3"):
        Split.of_text(torch.arange(3), 3)


def test_each_file_is_in_one_part_and_eight_of_ten_train() -> None:
    parts = code_parts()
    for place, file in ((0, 0), (0, 7), (1, 8), (2, 9)):
        text = (
            source_files()[file]
            .read_text(encoding="utf-8")
            .encode("ascii", "ignore")
            .decode("ascii")
        )
        assert [text in part for part in parts] == [
            place == other for other in range(3)
        ]
    sizes = [len(part) for part in parts]
    assert all(0.02 < size / sum(sizes) < 0.25 for size in sizes[1:])


def test_the_task_has_sequences_of_each_part_and_a_host_for_its_characters() -> None:
    task = load_task("code")
    assert task.train.x.shape[1] == LENGTH
    assert len(task.train) > 30 * len(task.validation)
    assert task.classes == len(set(code_parts()[0])) + 1 < 130
    host = task.build_host()
    assert host(task.sample).shape == (*task.sample.shape, task.classes)
    assert build_host("code").parameter_count == host.parameter_count


def test_a_python_without_its_sources_is_an_error_that_names_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path} has 0 sources"):
        load_task("code")
