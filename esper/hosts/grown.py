"""A host with the seeds it keeps, as a plain ``nn.Module``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from esper.hosts.host import Host


class GrownHost(nn.Module):
    """out = s_S(...(h_i + alpha_i · d_i(h_i))...) over the host's segments; inputs [B, ...] to logits [B, classes].

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
        for segment, site in zip(self.host.segments, self.host.sites, strict=False):
            x = segment(x)
            if site.name in self.seeds:
                x = torch.add(x, self.seeds[site.name](x), alpha=self.alphas[site.name])
        return self.host.segments[-1](x)  # type: ignore[no-any-return]
