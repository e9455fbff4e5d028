"""Text as a task: its vocabulary and its sizes."""

from __future__ import annotations

import torch

from esper.data.text import (
    LENGTH,
    UNKNOWN,
    VALIDATION,
    character_task,
    encode,
    vocabulary,
)


def test_characters_beyond_the_training_text_are_unknown() -> None:
    tokens = vocabulary("abca")
    assert tokens == {"a": 1, "b": 2, "c": 3}
    assert encode("cab?", tokens).tolist() == [3, 1, 2, UNKNOWN]


def test_a_task_may_have_the_vocabulary_of_another_text() -> None:
    text = "the quick brown fox " * 400
    tokens = vocabulary("abcdefghijklmnopqrstuvwxyz .")
    task = character_task("mine", "", (text, text, text), tokens)
    assert task.classes == len(tokens) + 1
    assert (task.train.x.shape[1], len(task.validation)) == (
        LENGTH,
        min(VALIDATION, len(task.test)),
    )
    assert task.build_host()(torch.zeros(2, LENGTH, dtype=torch.int64)).shape == (
        2,
        LENGTH,
        task.classes,
    )
