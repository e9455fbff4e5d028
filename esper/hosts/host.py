"""What a host is to the rest of Esper: segments of layers with a slot between any two of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from esper.seeds.slot import SlotSite


class Host(nn.Module):
    """Segments s_0 ... s_S and sites 0 ... S−1; site i sits between s_i and s_{i+1}, in execution order.

    The host alone is s_S(...s_1(s_0(x))). A walk over the segments is all that training, incubation and counterfactual
    evaluation need, so a new kind of host has to supply its segments only.
    """

    def __init__(self, segments: Sequence[nn.Module], sites: Sequence[SlotSite], topology: str) -> None:
        super().__init__()
        if len(segments) != len(sites) + 1:
            raise ValueError(f"{len(sites)} sites want {len(sites) + 1} segments, not {len(segments)}")
        self.segments = nn.ModuleList(segments)
        self.sites = tuple(sites)
        self.topology = topology

    def forward(self, x: Tensor) -> Tensor:
        """The host left alone: inputs [B, ...] to logits [B, classes]."""
        for segment in self.segments:
            x = segment(x)
        return x

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names in row-major order (r0c0, r0c1, ..., r1c0, ...): the order of actions and observations."""
        return tuple(sorted((site.name for site in self.sites), key=_row_and_column))


def _row_and_column(name: str) -> tuple[int, int]:
    """``r1c10`` → (1, 10). Raises ValueError for any other form."""
    match = re.fullmatch(r"r(\d+)c(\d+)", name)
    if match is None:
        raise ValueError(f"slot name {name!r} is not of the form r0c0: row and column")
    return int(match[1]), int(match[2])
