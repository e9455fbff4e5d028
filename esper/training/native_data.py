"""The data and the objective of a host, in the form in which native passes take them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from esper.data.objective import (
    ClassObjective,
    Explained,
    SampleObjective,
    binary_losses,
    label_accuracy,
    squared_error,
)
from esper.ops.tape import LOSSES, SCORES, Shape, Unsupported
from esper.training.host_training import HostTraining, feed_of

LOSS_OF = (
    (squared_error, "squared_error"),
    (binary_losses, "binary_cross_entropy"),
)
"""Losses of samples that have a compiled form, with its name."""


CHUNK = 128
"""Samples of a validation that pass through the layers together."""
POSITIONS = 512
"""Positions of sequences that do: those of one sequence, or of several."""


class NativeData:
    """Converts the samples of a host. What has no compiled form raises Unsupported.

    Of sequences, each position is a sample, with its token as a number.
    """

    def __init__(self, training: HostTraining) -> None:
        self.training = training

    @cached_property
    def length(self) -> int:
        """Positions of the sequences of tokens; 1 for other samples."""
        training = self.training
        if training.feed is None or training.host.topology != "transformer":
            return 1
        x = training.feed.x
        if not isinstance(x, Tensor) or x.dtype is not torch.int64 or x.dim() != 2:
            return 1
        return int(x.shape[1])

    @property
    def shape(self) -> Shape:
        """The shape of a sample."""
        if self.length > 1:
            return 1, 1, 1
        x = feed_of(self.training).x
        if not isinstance(x, Tensor) or x.dim() not in (2, 4) or not x.is_floating_point():
            raise Unsupported("inputs other than vectors and images of numbers have no compiled form")
        channels, height, width = (*x.shape[1:], 1, 1)[:3]
        return channels, height, width

    @property
    def chunk(self) -> int:
        """Samples of a validation that pass through the layers together."""
        if self.length == 1:
            return CHUNK
        return self.length * max(1, POSITIONS // self.length)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the host."""
        return next(self.training.host.parameters()).dtype

    @cached_property
    def objective(self) -> tuple[int, int, Tensor | None]:
        """The numbers of the loss and the score, and the variance of the targets for r2."""
        objective = self.training.task.objective
        if isinstance(objective, ClassObjective):
            return LOSSES.index("cross_entropy"), SCORES.index("accuracy"), None
        loss = self._loss_of(objective)
        if objective.score is label_accuracy:
            return loss, SCORES.index("labels"), None
        if not isinstance(objective.score, Explained):
            raise Unsupported("scores other than accuracy and r2 have no compiled form")
        variance = objective.score.variance.to(self.dtype)
        return loss, SCORES.index("explained"), variance.contiguous()

    def _loss_of(self, objective: SampleObjective) -> int:
        for function, name in LOSS_OF:
            if objective.loss is function:
                return LOSSES.index(name)
        raise Unsupported("losses other than cross_entropy, mse and bce have no compiled form")

    def samples(self, x: Tensor) -> Tensor:
        """Returns inputs [N, ...], or those of the positions of sequences, [N · T, 1]."""
        if self.length == 1:
            return x
        return x.reshape(-1, 1).to(self.dtype)

    def targets(self, y: Tensor) -> Tensor:
        """Returns targets: of classes int64 [N], or [N · T] of positions, others in the dtype of the host."""
        if isinstance(self.training.task.objective, ClassObjective):
            return self._classes(y)
        if y.dim() > 2:
            raise Unsupported("targets of several dimensions a sample have no compiled form")
        if torch.promote_types(self.dtype, y.dtype) != self.dtype:
            raise Unsupported(f"targets in {y.dtype} for outputs in {self.dtype} have no compiled form")
        return y.to(self.dtype).contiguous()

    def _classes(self, y: Tensor) -> Tensor:
        per_sample = y.numel() // max(len(y), 1)
        if per_sample != self.length:
            raise Unsupported("cross_entropy with several targets a sample has no compiled form")
        return y.reshape(-1).contiguous()

    def batches(self) -> tuple[Any, ...]:
        """The data of an epoch: inputs, targets, table, room for a batch, order and batch size."""
        feed = feed_of(self.training)
        split = feed.split
        if self.length == 1:
            staged = None
            if split.table is not None:
                staged = feed.x
            targets = self.targets(split.y)
            return split.x, targets, split.table, staged, feed.order, feed.batch_size
        # Only the rows that the epoch has are converted.
        x = self.samples(split.x[feed.order])
        y = self.targets(split.y[feed.order])
        order = torch.arange(len(x))
        return x, y, None, None, order, feed.batch_size * self.length
