"""Random images in memory as bytes, and their pixels through the table."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from esper.data.split import Split
from esper.ops.stage_batch import normalisation_table
from tests.training.byte_images import byte_digits

CPU = torch.device("cpu")


def colours(count: int = 40, side: int = 6) -> Split:
    """Random images of three channels, each normalised by its own numbers."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randint(
        256, (count, side, side, 3), generator=generator, dtype=torch.uint8
    )
    y = torch.randint(10, (count,), generator=generator)
    return Split(x, y, normalisation_table([0.2, 0.4, 0.6], [0.1, 0.2, 0.3]))


def looked_up(split: Split, rows: Tensor) -> Tensor:
    """Pixels through the table, one channel at a time: float32 [B, C, H, W]."""
    assert split.table is not None
    return torch.stack(
        [
            split.table[c][split.x[rows][..., c].long()]
            for c in range(split.x.shape[-1])
        ],
        dim=1,
    )


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The byte digits as networks see them, as a dataset to stream."""

    def __init__(self) -> None:
        split = byte_digits().train
        assert isinstance(split, Split)
        self.x, self.y = split.inputs(0, len(split)).contiguous(), split.y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]
