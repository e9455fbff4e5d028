"""A grown network as a host: its seeds are built in and train like every other layer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from esper.hosts.grown import GrownHost
from esper.hosts.host import At, Host


class StaticHost(Host):
    """The host of ``network`` with its kept seeds built in.

    Its sites are those of the original host, each after the seed that is built in there; alphas are constant.
    """

    def __init__(self, network: GrownHost) -> None:
        super().__init__()
        self.network = network
        host = network.host
        self.sites, self.topology, self.in_place = host.sites, host.topology, host.in_place
        self._occupied = {site for site, place in enumerate(host.sites) if place.name in network.kept}

    def probe(self, x: Tensor) -> None:
        self.network.host.probe(x)
        self.sites = self.network.host.sites
        self._occupied = {site for site, place in enumerate(self.sites) if place.name in self.network.kept}

    def walk(self, x: Tensor, at: At, vacant: Collection[int] = ()) -> Tensor:
        return self.network.host.walk(x, self._behind(at), self._free(vacant))

    def forward_from(self, x: Tensor, site: int, h: Tensor, at: At, vacant: Collection[int] = ()) -> Tensor:
        return self.network.host.forward_from(x, site, h, self._behind(at), self._free(vacant))

    def _behind(self, at: At) -> At:
        """Wraps ``at`` so that it sees the features after the built-in seed."""

        def grown(site: int, h: Tensor) -> Tensor:
            if site in self._occupied:
                name = self.sites[site].name
                h = torch.add(h, self.network.seeds[name](h), alpha=self.network.kept[name].alpha)
            return at(site, h)

        return grown

    def _free(self, vacant: Collection[int]) -> set[int]:
        """Returns the ``vacant`` sites without a built-in seed."""
        return set(vacant) - self._occupied
