"""Sequences of tokens in a memory-mapped uint16 file, so that they need not fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import ConfigError
from esper.data.shared_batches import Batch, BatchReader
from esper.ops.stage_batch import stage_tokens

SCAN = 1 << 24
"""Number of tokens checked at once, 32 MiB."""


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
