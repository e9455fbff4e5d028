"""A host with its kept seeds as a plain ``nn.Module``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.hosts.host import Host


@dataclass(frozen=True)
class KeptSeed:
    """Description of a kept seed: names of its blueprint and style, and its final alpha.

    Raises ValueError if alpha is outside [0, 1].
    """

    blueprint: str
    style: str
    alpha: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}, not between 0 and 1")


class GrownHost(nn.Module):
    """Maps inputs [B, ...] to logits; at every grown site i, the host continues with h_i + alpha_i · d_i(h_i).

    Args:
        host: the host.
        seeds: the seed of each grown slot, by slot name.
        kept: the description of each of these seeds, by slot name.
        task: name of the task on which it was grown.
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
