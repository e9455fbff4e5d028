"""Gradient statistics of an epoch, by owner: the sums over its batches of what the fused op measures in each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.ops import GradStats


@dataclass(frozen=True)
class GradientSummary:
    """Means over the epoch's batches, for one owner's gradients before clipping."""

    norm: float
    elements: float
    health: float
    vanishing: float
    """Fraction of tensors, 0 to 1."""
    exploding: float
    not_finite: float
    """NaN and infinite elements, summed over the epoch."""

    def ratio_to(self, host: GradientSummary) -> float:
        """(‖g_seed‖/√n_seed) / (‖g_host‖/√n_host + 1e-8)."""
        mine = self.norm / math.sqrt(max(self.elements, 1.0))
        return mine / (host.norm / math.sqrt(max(host.elements, 1.0)) + 1e-8)


class SeedGradientCollector:
    """Adds up one epoch's statistics on the device and reads them once."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.total: Tensor | None = None  # float64 [G, F]
        self.left_out: Tensor | None = None  # float64 [G], batches that a group does not count
        self.batches = 0

    def begin(self, names: tuple[str, ...]) -> None:
        """Start an epoch whose groups have these names, host first."""
        self.names, self.total, self.left_out, self.batches = names, None, None, 0

    def add(self, stats: GradStats, excused: Tensor | None = None) -> None:
        """Add one batch; ``stats`` has one group for each name, of which those ``excused``, bool [G], are left out."""
        self.batches += 1
        fields = stats.fields if excused is None else torch.where(excused[:, None], 0, stats.fields)  # [G, F]
        if excused is not None:
            left_out = excused.double()
            self.left_out = left_out if self.left_out is None else self.left_out.add_(left_out)
        if self.total is None:
            self.total = fields.clone()
        else:
            self.total.add_(fields)

    def packed(self, device: torch.device) -> Tensor:
        """The sums as one flat float64 tensor for the epoch's transfer."""
        if self.total is None:
            return torch.empty(0, dtype=torch.float64, device=device)
        left_out = self.total.new_zeros(len(self.total)) if self.left_out is None else self.left_out
        return torch.cat((self.total, left_out[:, None]), dim=1).flatten()

    def summaries(self, packed: Tensor) -> dict[str, GradientSummary]:
        """By name, from the transferred ``packed``."""
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
