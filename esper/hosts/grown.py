"""A host with its kept seeds: as a plain ``nn.Module``, and as a host whose seeds are built in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.hosts.host import Host, SiteHook
from esper.hosts.inputs import Inputs, gathered


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
    """Maps inputs, as its host takes them, to logits; at each grown site i, it goes on with h_i + alpha_i · d_i(h_i).

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

    def forward(self, *x: Any, **named: Any) -> Tensor:
        return self.host.forward_with_hook(gathered(x, named), self.add_seed)

    def add_seed(self, site: int, h: Tensor) -> Tensor:
        """Returns the features after ``site``: ``h`` with the output of its seed added, if it has one."""
        name = self.host.sites[site].name
        return torch.add(h, self.seeds[name](h), alpha=self.kept[name].alpha) if name in self.seeds else h


class StaticHost(Host):
    """The host of ``network`` with its kept seeds built in: they train like every other layer, at constant alphas.

    Its sites are those of the original host, each after the seed that is built in there.
    """

    def __init__(self, network: GrownHost) -> None:
        super().__init__()
        self.network = network
        host = network.host
        self.sites, self.topology, self.in_place = host.sites, host.topology, host.in_place

    def probe(self, x: Inputs) -> None:
        self.network.host.probe(x)
        self.sites = self.network.host.sites

    def forward_with_hook(self, x: Inputs, hook: SiteHook, vacant: Collection[int] = ()) -> Tensor:
        return self.network.host.forward_with_hook(x, self._after_seeds(hook), self._free(vacant))

    def forward_from(self, x: Inputs, site: int, h: Tensor, hook: SiteHook, vacant: Collection[int] = ()) -> Tensor:
        return self.network.host.forward_from(x, site, h, self._after_seeds(hook), self._free(vacant))

    def _after_seeds(self, hook: SiteHook) -> SiteHook:
        return lambda site, h: hook(site, self.network.add_seed(site, h))

    def _free(self, vacant: Collection[int]) -> set[int]:
        """Returns the ``vacant`` sites without a built-in seed."""
        return {site for site in vacant if self.sites[site].name not in self.network.seeds}
