"""A host with the seeds it keeps, as a plain ``nn.Module``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from esper.hosts.host import Host


class GrownHost(nn.Module):
    """At every grown site i the host goes on with h_i + alpha_i · d_i(h_i); inputs [B, ...] to logits.

    Args:
        host: the host.
        seeds: the seed of each grown slot, by slot name.
        alphas: how much of each seed is blended in.
    """

    def __init__(self, host: Host, seeds: Mapping[str, nn.Module], alphas: Mapping[str, float]) -> None:
        super().__init__()
        self.host = host
        self.seeds = nn.ModuleDict(seeds)
        self.alphas = dict(alphas)

    def forward(self, x: Tensor) -> Tensor:
        return self.host.walk(x, self._grown)

    def _grown(self, site: int, h: Tensor) -> Tensor:
        name = self.host.sites[site].name
        return torch.add(h, self.seeds[name](h), alpha=self.alphas[name]) if name in self.seeds else h
