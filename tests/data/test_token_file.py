"""Sequences of tokens in a memory-mapped file."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.data.tinystories import LENGTH, VOCABULARY
from esper.data.token_file import TokenWindows
from tests.data.token_files import write_bins


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
