"""An env's batches out of data in memory: an order of its own each epoch, and buffers that every batch is put into."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.data.task import Augmentation, Split
from esper.ops import stage_images
from esper.training.upload import upload

EPOCH_BITS = 32
"""The operator's epoch number is (episode, epoch)."""


class Feed:
    """The training batches of one env, whose buffers and place are where a captured step finds them.

    Args:
        split: where samples come from.
        batch_size: samples in a batch.
        samples: of an epoch; a last batch that is not full is left out.
        augmentation: what is done to images of bytes.
        dtype: of images that are staged from bytes; other inputs keep theirs.
    """

    def __init__(
        self, split: Split, batch_size: int, samples: int, augmentation: Augmentation, dtype: torch.dtype
    ) -> None:
        self.split, self.batch_size, self.augmentation = split, batch_size, augmentation
        self.batches = samples // batch_size
        self.seed, self.episode = 0, 0
        self.device = split.y.device
        self.by_cursor = self.device.type != "cpu"
        """Whether batches come one after the other, from where the cursor is; else each is asked for by its number."""
        self.order = torch.zeros(self.batches * batch_size, dtype=torch.int64, device=self.device)
        self.cursor = torch.zeros(2, dtype=torch.int64, device=self.device)
        """(epoch, place in the order of the next batch's first sample), which steps read on the device."""
        self.x, self.y = split.empty(batch_size, dtype), split.y.new_empty((batch_size, *split.y.shape[1:]))

    def restart(self, seed: int, episode: int) -> None:
        """What augmentation draws depends on ``seed``, of 64 bits, ``episode``, epoch and sample. Only the seed is part
        of a captured step."""
        self.seed, self.episode = seed >> 1, episode  # operators take 63 bits

    def begin(self, epoch: int, generator: torch.Generator) -> None:
        """Draw the order of an epoch from ``generator``, on the CPU."""
        self.epoch = self.episode << EPOCH_BITS | epoch
        upload(torch.randperm(len(self.split), generator=generator)[: len(self.order)], self.order)
        if self.by_cursor:
            upload(torch.tensor([self.epoch, 0]), self.cursor)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs [B, ...] and targets of batch ``number``, until the next call; by the cursor simply the next one."""
        first = number * self.batch_size
        if self.split.table is not None:
            self._stage_images(self.split.table, first)
        else:
            rows = self._rows_at_cursor() if self.by_cursor else self.order[first : first + self.batch_size]
            torch.index_select(self.split.x, 0, rows, out=self.x)
            torch.index_select(self.split.y, 0, rows, out=self.y)
        if self.by_cursor:
            self.cursor[1].add_(self.batch_size)
        return self.x, self.y

    def _stage_images(self, table: Tensor, first: int) -> None:
        stage_images(
            self.split.x,
            self.order,
            table,
            seed=self.seed,
            epoch=0 if self.by_cursor else self.epoch,
            first=0 if self.by_cursor else first,
            cursor=self.cursor if self.by_cursor else None,
            padding=self.augmentation.crop,
            flip=self.augmentation.flip,
            targets=self.split.y,
            out=self.x,
            targets_out=self.y,
        )

    def _rows_at_cursor(self) -> Tensor:
        places = self.cursor[1] + torch.arange(self.batch_size, device=self.device)
        return self.order.index_select(0, places)
