"""A host with the seeds it keeps, as a plain ``nn.Module``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.hosts.host import Host


@dataclass(frozen=True)
class KeptSeed:
    """How a grown slot came to what it holds, by the names that registries know."""

    blueprint: str
    style: str
    alpha: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}, not between 0 and 1")


class GrownHost(nn.Module):
    """At every grown site i the host goes on with h_i + alpha_i · d_i(h_i); inputs [B, ...] to logits.

    Args:
        host: the host.
        seeds: the seed of each grown slot, by slot name.
        kept: what each of these seeds is, and how much of it is blended in.
        task: name of the task that it was grown on.
    """

    def __init__(self, host: Host, seeds: Mapping[str, nn.Module], kept: Mapping[str, KeptSeed], task: str) -> None:
        super().__init__()
        self.host = host
        self.seeds = nn.ModuleDict(seeds)
        self.kept = dict(kept)
        self.task = task

    def forward(self, x: Tensor) -> Tensor:
        return self.host.walk(x, self._grown)

    def _grown(self, site: int, h: Tensor) -> Tensor:
        name = self.host.sites[site].name
        return torch.add(h, self.seeds[name](h), alpha=self.kept[name].alpha) if name in self.seeds else h
