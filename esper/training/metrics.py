"""Sums of an epoch on the device: losses and accuracies of passes, statistics of gradients, and non-finite values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.ops.accumulators import Accumulators, accumulate_
from esper.ops.grad_stats import FIELDS, GradStats, grad_stats
from esper.training.tensors import buffers_of

HOST = "host"
"""Name of the host among the owners of parameters and gradients; a seed has that of its slot."""


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


@dataclass(frozen=True)
class GradientSummary:
    """Statistics of one owner's gradients before clipping, averaged over the epoch's batches."""

    norm: float
    elements: float
    health: float
    vanishing: float
    """Fraction of gradient tensors that vanish, 0 to 1."""
    exploding: float
    not_finite: float
    """Number of NaN and infinite elements, summed over the epoch."""

    def health_by(self, vanishing_weight: float, exploding_weight: float) -> float:
        """Returns the health with these weights; ``health`` is the operator's, whose weights are 0.5 and 0.8."""
        lost = (vanishing_weight - 0.5) * self.vanishing + (exploding_weight - 0.8) * self.exploding
        return max(0.0, self.health - lost)

    def ratio_to(self, host: GradientSummary) -> float:
        """(‖g_seed‖/√n_seed) / (‖g_host‖/√n_host + 1e-8)."""
        return self._typical_size / (host._typical_size + 1e-8)

    @property
    def _typical_size(self) -> float:
        """Root mean square of the elements."""
        return self.norm / math.sqrt(max(self.elements, 1.0))


class SeedGradientCollector:
    """Sums one epoch's statistics of up to ``groups`` owners on the device, to be read once."""

    def __init__(self, groups: int, device: torch.device) -> None:
        self.names: tuple[str, ...] = ()
        self.batches = 0
        self._block = torch.zeros(groups, len(FIELDS) + 1, dtype=torch.float64, device=device)

    @property
    def total(self) -> Tensor:
        """Sums of this epoch, float64 [G, F + 1], always in the same memory.

        They are those of ``FIELDS``, and the number of batches that overflowed.
        """
        return self._block[: len(self.names)]

    def restart(self, names: tuple[str, ...]) -> None:
        """Zeroes the sums for an epoch whose groups have these names, the host first."""
        self.names = names
        self.batches = 0
        self._block.zero_()

    def add(self, stats: GradStats, overflowed: Tensor | None = None) -> None:
        """Adds one batch; ``stats`` has a group for each name. Groups that ``overflowed`` (bool [G]) are skipped."""
        self.batches += 1
        fields = stats.fields
        if overflowed is not None:
            fields = torch.where(overflowed[:, None], 0, fields)
            self.total[:, -1].add_(overflowed)
        self.total[:, :-1].add_(fields)

    def packed(self) -> Tensor:
        """Returns the sums as one flat float64 tensor for the epoch's transfer."""
        return self.total.flatten()

    def summaries(self, packed: Tensor) -> dict[str, GradientSummary]:
        """Returns the summaries by name from the transferred ``packed``; empty without batches."""
        if not self.names or not self.batches:
            return {}
        rows = packed.view(len(self.names), -1).tolist()
        result = {}
        for name, (*fields, overflowed) in zip(self.names, rows, strict=True):
            sums = dict(zip(FIELDS, fields, strict=True))
            tensors = max(sums["tensors"], 1.0)
            # Batches that overflowed are not in the sums.
            batches = max(self.batches - overflowed, 1)
            result[name] = GradientSummary(
                norm=sums["norm"] / batches,
                elements=sums["elements"] / batches,
                health=sums["health"] / batches,
                vanishing=sums["vanishing"] / tensors,
                exploding=sums["exploding"] / tensors,
                not_finite=sums["nan"] + sums["inf"],
            )
        return result


def finite_buffers(network: nn.Module) -> set[str]:
    """The names of buffers that are finite now, so that only a bad network makes them non-finite (no −inf masks)."""
    names = set()
    for name, buffer in network.named_buffers():
        if buffer.is_floating_point() and buffer.isfinite().all():
            names.add(name)
    return names


def count_not_finite(
    network: nn.Module,
    buffers: Collection[str],
    parameters: Iterable[Tensor],
) -> Tensor:
    """Returns the number of non-finite values in ``parameters`` and in the named buffers of ``network``, float64 []."""
    values = list(parameters)
    values += [buffer for name, buffer in buffers_of(network) if name in buffers]
    stats = grad_stats([[value.detach() for value in values if value.is_floating_point()]])
    return (stats.nan + stats.inf).sum()
