"""A host's batches from data in memory, in a new order each epoch, in buffers that every batch reuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper.data.split import Split
from esper.data.task import Augmentation
from esper.hosts.inputs import select_rows
from esper.ops.stage_batch import stage_images, stage_tokens

EPOCH_BITS = 32
"""Number of bits of the epoch in the operator's epoch number, which is episode << EPOCH_BITS | epoch."""


def upload(values: Tensor, into: Tensor) -> None:
    """Copies ``values`` from pageable CPU memory to the device, on the current stream, without waiting.

    The caller may free or change ``values`` afterwards: CUDA has read pageable memory when the call returns.
    """
    into.copy_(values, non_blocking=into.device.type == "cuda")


class BatchLoader:
    """The training batches of one host, with buffers and a cursor at fixed addresses for captured steps.

    Args:
        split: the training samples.
        batch_size: samples per batch.
        samples: samples per epoch; an incomplete last batch is dropped.
        augmentation: augmentation of images stored as bytes.
        dtype: dtype of images staged from bytes; other inputs keep theirs.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        samples: int,
        augmentation: Augmentation,
        dtype: torch.dtype,
    ) -> None:
        self.split = split
        self.batch_size = batch_size
        self.augmentation = augmentation
        self.batches = samples // batch_size
        self.seed = 0
        self.episode = 0
        self.device = split.y.device
        self.by_cursor = self.device.type != "cpu"
        """True if batches follow one another from the cursor (not on a CPU); otherwise each is chosen by its number."""
        self.order = torch.zeros(self.batches * batch_size, dtype=torch.int64, device=self.device)
        self.cursor = torch.zeros(2, dtype=torch.int64, device=self.device)
        """(epoch, position in ``order`` of the next batch's first sample), int64 [2]; steps read it on the device."""
        self.x = split.empty(batch_size, dtype)
        self.y = split.y.new_empty((batch_size, *split.y.shape[1:]))
        self.rows: Tensor | None = None
        """Sequences with their last target, a view [N, T + 1] of the text; None for other data."""
        if split.text is not None:
            length = split.x.shape[1]  # a row has one token more, the last target
            self.rows = split.text.unfold(0, length + 1, length)

    def restart(self, seed: int, episode: int) -> None:
        """Starts an episode. Augmentation depends on ``seed`` (64 bits), ``episode``, epoch and sample.

        A captured step has the seed as a constant, but not the episode.
        """
        self.seed = seed >> 1  # operators take 63 bits
        self.episode = episode

    def shuffle(self, epoch: int, generator: torch.Generator) -> None:
        """Draws the order of an epoch from ``generator``, a CPU generator."""
        self.epoch = self.episode << EPOCH_BITS | epoch
        # The order of all samples is drawn, also if an epoch has fewer.
        order = torch.randperm(len(self.split), generator=generator)
        upload(order[: len(self.order)], self.order)
        if self.by_cursor:
            upload(torch.tensor([self.epoch, 0]), self.cursor)

    def batch(self, number: int) -> tuple[Any, Tensor]:
        """Returns inputs [B, ...] and targets of batch ``number``, valid until the next call.

        With ``by_cursor``, it is always the next batch.
        """
        first = number * self.batch_size
        cursor = self.cursor if self.by_cursor else None
        if self.split.table is not None:
            # The operator gathers labels, too, but no other targets.
            targets = None
            targets_out = None
            labels = self.y.dtype == torch.int64 and self.y.dim() == 1
            if labels:
                targets = self.split.y
                targets_out = self.y
            stage_images(
                self.split.x,
                self.order,
                self.split.table,
                seed=self.seed,
                epoch=self.epoch,
                first=first,
                cursor=cursor,
                padding=self.augmentation.crop,
                flip=self.augmentation.flip,
                targets=targets,
                out=self.x,
                targets_out=targets_out,
            )
            if not labels:
                torch.index_select(self.split.y, 0, self._rows(first), out=self.y)
        elif self.rows is not None:
            stage_tokens(
                self.rows,
                self.order,
                first=first,
                cursor=cursor,
                out=self.x,
                targets_out=self.y,
            )
        else:
            rows = self._rows(first)
            select_rows(self.split.x, rows, out=self.x)
            torch.index_select(self.split.y, 0, rows, out=self.y)
        if self.by_cursor:
            self.cursor[1].add_(self.batch_size)
        return self.x, self.y

    def _rows(self, first: int) -> Tensor:
        """Returns the rows of the batch whose first sample is at ``first``, or at the cursor, int64 [B]."""
        if not self.by_cursor:
            return self.order[first : first + self.batch_size]
        places = self.cursor[1] + torch.arange(self.batch_size, device=self.device)
        return self.order.index_select(0, places)
