"""Tokens in a memory-mapped uint16 file, read one row at a time, so that they need not fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import ConfigError
from esper.data.shared_batches import Batch, BatchReader
from esper.ops import stage_tokens

SCAN = 1 << 24
"""Number of tokens checked at once, 32 MiB."""


class TokenFile:
    """The tokens of one file; it is opened on first use and pickled by its path.

    Raises ConfigError if the file is empty or has an odd size, or contains a token outside the vocabulary.
    """

    def __init__(self, path: Path, vocabulary: int) -> None:
        self.path = path
        size = path.stat().st_size
        if size == 0 or size % 2:
            raise ConfigError(f"{path} has {size} bytes; a token file has two bytes per token (uint16, little-endian)")
        self._tokens: NDArray[np.uint16] | None = None
        for first in range(0, len(self), SCAN):
            highest = int(self.tokens[first : first + SCAN].max())
            if highest >= vocabulary:
                raise ConfigError(f"{path} holds token {highest}; the host's vocabulary has 0 to {vocabulary - 1}")

    @property
    def tokens(self) -> NDArray[np.uint16]:
        """Memory-mapped tokens, uint16 [M]."""
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype="<u2", mode="c")  # torch wants it writable; nothing is written
        return self._tokens

    def __len__(self) -> int:
        return self.path.stat().st_size // 2

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "_tokens": None}  # a memory map would be pickled as a copy of the whole file


class TokenWindows(BatchReader):
    """Non-overlapping windows of ``length`` tokens with targets shifted by one: pairs (x, y), each int64 [length].

    Raises ConfigError if the file is too short for one window.
    """

    def __init__(self, file: TokenFile, length: int) -> None:
        self.file, self.length = file, length
        self.count = (len(file) - 1) // length
        if self.count < 1:
            raise ConfigError(f"{file.path} has {len(file)} tokens; a sequence with its targets needs {length + 1}")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if not 0 <= row < self.count:
            raise IndexError(f"row {row} of {self.count}")
        x, y = self.batch([row])
        return x[0], y[0]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Returns sequences and their next tokens, each int64 [len(rows), length], in one pass over the file."""
        windows = torch.from_numpy(self.file.tokens).unfold(0, self.length + 1, self.length)  # [N, T + 1] uint16
        x = torch.empty(len(rows), self.length, dtype=torch.int64)
        y = torch.empty_like(x)
        stage_tokens(windows, torch.tensor(rows), out=x, targets_out=y)
        return x, y
