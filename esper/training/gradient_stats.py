"""Gradient statistics of an epoch by owner: the sums over its batches of the fused operator's results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.ops import FIELDS, GradStats


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

    def ratio_to(self, host: GradientSummary) -> float:
        """(‖g_seed‖/√n_seed) / (‖g_host‖/√n_host + 1e-8)."""
        mine = self.norm / math.sqrt(max(self.elements, 1.0))
        return mine / (host.norm / math.sqrt(max(host.elements, 1.0)) + 1e-8)


class SeedGradientCollector:
    """Sums one epoch's statistics of up to ``groups`` owners on the device, to be read once."""

    def __init__(self, groups: int, device: torch.device) -> None:
        self.names: tuple[str, ...] = ()
        self.batches = 0
        self._block = torch.zeros(groups, len(FIELDS) + 1, dtype=torch.float64, device=device)

    @property
    def total(self) -> Tensor:
        """Sums of this epoch, float64 [G, F + 1]: the fields named by ``esper.ops.FIELDS``, and the number of excused
        batches. They are always in the same memory."""
        return self._block[: len(self.names)]

    def begin(self, names: tuple[str, ...]) -> None:
        """Starts an epoch whose groups have these names, the host first."""
        self.names, self.batches = names, 0
        self._block.zero_()

    def add(self, stats: GradStats, excused: Tensor | None = None) -> None:
        """Adds one batch; ``stats`` has a group for each name. Groups that are ``excused`` (bool [G]) are skipped."""
        self.batches += 1
        fields = stats.fields if excused is None else torch.where(excused[:, None], 0, stats.fields)
        self.total[:, :-1].add_(fields)
        if excused is not None:
            self.total[:, -1].add_(excused)

    def packed(self) -> Tensor:
        """Returns the sums as one flat float64 tensor for the epoch's transfer."""
        return self.total.flatten()

    def summaries(self, packed: Tensor) -> dict[str, GradientSummary]:
        """Returns the summaries by name from the transferred ``packed``; empty without batches."""
        if not self.names or not self.batches:
            return {}
        sums = packed.view(len(self.names), -1)
        stats, left_out = GradStats(sums[:, :-1], packed.new_empty(0)), sums[:, -1].tolist()
        result = {}
        for index, name in enumerate(self.names):
            tensors, batches = max(float(stats.tensors[index]), 1.0), max(self.batches - left_out[index], 1)
            result[name] = GradientSummary(
                norm=float(stats.norm[index]) / batches,
                elements=float(stats.elements[index]) / batches,
                health=float(stats.health[index]) / batches,
                vanishing=float(stats.vanishing[index]) / tensors,
                exploding=float(stats.exploding[index]) / tensors,
                not_finite=float(stats.nan[index] + stats.inf[index]),
            )
        return result
