"""`tinystories`: short stories for a transformer of 30 million parameters, from files in the data folder.

``tinystories/`` contains the token files ``train.bin`` and ``validation.bin``: GPT-2's tokens as uint16, with the token
of ``<|endoftext|>`` after each story.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import ConfigError
from esper.data.split import Batch, BatchReader, Split
from esper.data.task import DataOptions, Task
from esper.hosts.transformer import TransformerHost
from esper.ops.stage_batch import stage_tokens

NAME = "tinystories"
DESCRIPTION = "short stories, from a local folder; transformer of 30,044,544 parameters, GPT-2's vocabulary"
VOCABULARY = 50_257
LENGTH = 256
MEASURED = 32
"""Number of sequences of 256 tokens for validation, and for test: 8,192 tokens, whose accuracy has a standard error
near 0.5 pp. There are no more because every epoch evaluates them once for each configuration of the seeds."""
PARTS = ("train", "validation")
SCAN = 1 << 24
"""Number of tokens checked at once, 32 MiB."""


def build_host() -> TransformerHost:
    """Makes a transformer with six layers of width 384 and a slot after every second one."""
    return TransformerHost(
        vocabulary=VOCABULARY,
        width=384,
        layers=6,
        heads=6,
        block=LENGTH,
        slots=3,
    )


def load(options: DataOptions) -> Task:
    """Loads the task. Workers read training sequences from the file, because they may not fit in memory.

    Validation uses the first half of the validation stories, test the second half. Raises ConfigError for files that
    are missing or unusable.
    """
    try:
        train, validation = token_files(options.folder / NAME)
    except OSError as error:  # no permission to read
        raise ConfigError(f"{options.folder / NAME} cannot be used: {error}") from None
    held_out = torch.from_numpy(np.asarray(validation.tokens, dtype=np.int64))
    middle = len(held_out) // 2
    if middle <= LENGTH:
        raise ConfigError(f"{validation.path} has {len(held_out)} tokens; {2 * LENGTH + 2} or more are needed")
    return Task(
        name=NAME,
        description=DESCRIPTION,
        classes=VOCABULARY,
        build_host=build_host,
        train=train,
        validation=Split.of_text(held_out[:middle], LENGTH).evenly_spaced(MEASURED),
        test=Split.of_text(held_out[middle:], LENGTH).evenly_spaced(MEASURED),
        learning_rate=1e-3,
        warmup_epochs=1.0,
        optimizer="adamw",
        weight_decay=0.1,
        batch_size=16,
        samples_per_epoch=min(1_024, len(train)),
        n_envs=2,
        episode_length=30,
        rounds=1,
        evaluation_batch=4,
    )


def token_files(folder: Path) -> tuple[TokenWindows, TokenWindows]:
    """Returns the training and validation tokens. Raises ConfigError if files are missing or unusable."""
    files = [folder / f"{part}.bin" for part in PARTS]
    missing = [f"  missing: {file}" for file in files if not file.is_file()]
    if missing:
        message = [
            "TinyStories cannot be read:",
            *missing,
            "They are files of GPT-2's tokens (uint16), with the token of <|endoftext|> after each story, and are not "
            "downloaded (task.download does nothing here).",
            "Stories: https://huggingface.co/datasets/roneneldan/TinyStories (TinyStoriesV2-GPT4-train.txt and "
            "TinyStoriesV2-GPT4-valid.txt). Tokenizer: https://huggingface.co/openai-community/gpt2",
            "Another folder: --set task.data=FOLDER, or the environment variable ESPER_DATA.",
        ]
        raise ConfigError("\n".join(message))
    train, validation = (TokenWindows(file, VOCABULARY, LENGTH) for file in files)
    return train, validation


class TokenWindows(BatchReader):
    """Non-overlapping windows of ``length`` tokens with targets shifted by one: pairs (x, y), each int64 [length].

    The file is opened on first use. Raises ConfigError if it has an odd size, is too short for one window, or contains
    a token outside the vocabulary.
    """

    def __init__(self, path: Path, vocabulary: int, length: int) -> None:
        self.path = path
        self.length = length
        size = path.stat().st_size
        if size == 0 or size % 2:
            raise ConfigError(f"{path} has {size} bytes; a token file has two bytes per token (uint16, little-endian)")
        total = size // 2
        self.count = (total - 1) // length  # the last target is one further
        if self.count < 1:
            raise ConfigError(f"{path} has {total} tokens; a sequence with its targets needs {length + 1}")
        for first in range(0, total, SCAN):
            highest = int(self.tokens[first : first + SCAN].max())
            if highest >= vocabulary:
                raise ConfigError(f"{path} holds token {highest}; the host's vocabulary has 0 to {vocabulary - 1}")

    @cached_property
    def tokens(self) -> NDArray[np.uint16]:
        """Memory-mapped tokens, uint16 [M]."""
        return np.memmap(self.path, dtype="<u2", mode="c")  # writable for torch; nothing is written

    def __getstate__(self) -> dict[str, object]:
        # A memory map would be pickled as a copy of the whole file.
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if not 0 <= row < self.count:
            raise IndexError(f"row {row} of {self.count}")
        x, y = self.batch([row])
        return x[0], y[0]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Returns sequences and their next tokens, each int64 [len(rows), length], in one pass over the file."""
        windows = torch.from_numpy(self.tokens).unfold(0, self.length + 1, self.length)  # [N, T + 1] uint16
        x = torch.empty(len(rows), self.length, dtype=torch.int64)
        y = torch.empty_like(x)
        stage_tokens(windows, torch.tensor(rows), out=x, targets_out=y)
        return x, y
