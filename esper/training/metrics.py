"""Sums of an epoch on the device, in one block for all envs; a lane writes only the rows of its own env."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.ops import ACCUMULATOR_FIELDS, Accumulators, accumulate_, cross_entropy_into

FIELDS = len(ACCUMULATOR_FIELDS)


@dataclass(frozen=True)
class EpochMetrics:
    """One env's part of the accumulators of all envs: row 0 is the training pass, the others are configurations.

    Rows are zeroed on the lane that adds to them, so that no stream waits for another one's zeros.
    """

    accumulators: Accumulators
    place: int
    """Index of the env in the block."""

    @property
    def training(self) -> Tensor:
        """Sums of the training pass so far, float64 [5], named by ``ACCUMULATOR_FIELDS``."""
        return self.accumulators.block[self.place, 0]

    def zero_training(self) -> None:
        self.training.zero_()

    def add_training(self, stats: Tensor) -> None:
        """Adds the statistics of one batch, float64 [5], as ``cross_entropy`` returns them."""
        accumulate_(self.accumulators, self.place, stats)

    def zero_validation(self, count: int) -> None:
        """Zeroes the sums of the first ``count`` configurations; results of samples are overwritten anyway."""
        self.stats(count).zero_()

    def add_validation(self, configuration: int, logits: Tensor, y: Tensor, sample: int, ignore: int) -> None:
        """Adds a batch of one configuration, whose first sample has index ``sample`` in the split."""
        cross_entropy_into(logits, y, self.accumulators, self.place, 1 + configuration, sample, ignore_index=ignore)

    def stats(self, configurations: int) -> Tensor:
        """Returns the sums of the first K configurations, float64 [K, 5]."""
        return self.accumulators.block[self.place, 1 : 1 + configurations]

    def correct(self, configurations: int) -> Tensor:
        """Returns the number of correct targets in each sample, [K, n]: uint8 for classes, int16 for tokens."""
        return self.accumulators.correct[self.place, 1 : 1 + configurations]


def make_metrics(
    n_envs: int, device: torch.device, configurations: int = 0, samples: int = 0, language: bool = False
) -> list[EpochMetrics]:
    """Makes zeroed totals of ``n_envs`` envs in one buffer, for up to ``configurations`` on ``samples`` samples."""
    accumulators = Accumulators(n_envs, 1 + configurations, samples, language, device)
    return [EpochMetrics(accumulators, place) for place in range(n_envs)]
