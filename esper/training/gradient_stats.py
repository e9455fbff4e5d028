"""Statistics of an epoch's gradients by owner, the host and each seed, summed on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.ops.grad_stats import FIELDS, GradStats

HOST = "host"
"""Name of the host among the owners of parameters and gradients; a seed has that of its slot."""


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
