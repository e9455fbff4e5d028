"""Sums of an epoch on the device: losses and accuracies of passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.data.objective import Objective
from esper.ops.accumulators import Accumulators, accumulate_


@dataclass(frozen=True)
class EpochMetrics:
    """One host's part of the accumulators of all hosts: row 0 is the training pass, the others are configurations.

    Rows are zeroed by the thread or stream that adds to them, so that no stream waits for another one's zeros.
    """

    accumulators: Accumulators
    place: int
    """Index of the host in the block."""

    @property
    def training(self) -> Tensor:
        """Sums of the training pass so far, float64 [5], named by ``ACCUMULATOR_FIELDS``."""
        return self.accumulators.block[self.place, 0]

    def zero_training(self) -> None:
        self.training.zero_()

    def add_training(self, stats: Tensor) -> None:
        """Adds the sums of one batch, float64 [5], as ``Objective.measure`` returns them."""
        accumulate_(self.accumulators, self.place, stats)

    def zero_validation(self, count: int) -> None:
        """Zeroes the sums of the first ``count`` configurations; results of samples are overwritten anyway."""
        self.stats(count).zero_()

    def add_validation(
        self,
        objective: Objective,
        configuration: int,
        outputs: Tensor,
        y: Tensor,
        sample: int,
    ) -> None:
        """Adds a batch of one configuration, whose first sample has index ``sample`` in the split."""
        objective.measure_into(
            outputs,
            y,
            self.accumulators,
            self.place,
            1 + configuration,
            sample,
        )

    def stats(self, configurations: int) -> Tensor:
        """Returns the sums of the first K configurations, float64 [K, 5]."""
        return self.accumulators.block[self.place, 1 : 1 + configurations]

    def correct(self, configurations: int) -> Tensor:
        """Returns the score of each sample, [K, n].

        It is the number of correct targets, uint8 for classes and int16 for tokens, or any other score in float32.
        """
        return self.accumulators.correct[self.place, 1 : 1 + configurations]


def make_metrics(
    n_envs: int,
    device: torch.device,
    configurations: int = 0,
    samples: int = 0,
    dtype: torch.dtype = torch.uint8,
) -> list[EpochMetrics]:
    """Makes zeroed sums for ``n_envs`` hosts in one block, for up to ``configurations`` on ``samples`` samples.

    ``dtype`` is that of the samples' scores.
    """
    accumulators = Accumulators(n_envs, 1 + configurations, samples, dtype, device)
    return [EpochMetrics(accumulators, place) for place in range(n_envs)]
