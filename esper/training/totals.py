"""What an epoch adds up, on the device: one block for all envs, of which a lane writes its own env's rows only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.ops import ACCUMULATOR_FIELDS, Accumulators, accumulate_, cross_entropy_into

FIELDS = len(ACCUMULATOR_FIELDS)


@dataclass(frozen=True)
class EpochTotals:
    """One env's part of the accumulators of all: row 0 is the training pass, the others are validated configurations.

    Rows are zeroed on the lane that adds to them, so no stream ever waits for another one's zeros.
    """

    accumulators: Accumulators
    place: int
    """Of the env in the block."""

    @property
    def training(self) -> Tensor:
        """The training pass so far, float64 [5], named by ``ACCUMULATOR_FIELDS``."""
        return self.accumulators.block[self.place, 0]

    def zero_training(self) -> None:
        self.training.zero_()

    def add_training(self, stats: Tensor) -> None:
        """Add one batch, float64 [5] as ``cross_entropy`` returns it."""
        accumulate_(self.accumulators, self.place, stats)

    def zero_validation(self, count: int) -> None:
        """The rows of ``count`` configurations begin anew; those of samples are written over."""
        self.stats(count).zero_()

    def add_validation(self, configuration: int, logits: Tensor, y: Tensor, sample: int, ignore: int) -> None:
        """Add a batch of one configuration, whose first sample is number ``sample`` of the split."""
        cross_entropy_into(logits, y, self.accumulators, self.place, 1 + configuration, sample, ignore_index=ignore)

    def stats(self, configurations: int) -> Tensor:
        """Sums of the first validated configurations, float64 [K, 5]."""
        return self.accumulators.block[self.place, 1 : 1 + configurations]

    def correct(self, configurations: int) -> Tensor:
        """Targets met in each sample, [K, n]: uint8 for classes, int16 for tokens."""
        return self.accumulators.correct[self.place, 1 : 1 + configurations]


def make_totals(
    n_envs: int, device: torch.device, configurations: int = 0, samples: int = 0, language: bool = False
) -> list[EpochTotals]:
    """Zeroed totals of ``n_envs`` envs in one buffer, for up to ``configurations`` of ``samples`` validated samples."""
    accumulators = Accumulators(n_envs, 1 + configurations, samples, language, device)
    return [EpochTotals(accumulators, place) for place in range(n_envs)]
