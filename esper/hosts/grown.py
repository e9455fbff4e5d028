"""A host with its kept seeds, which is a host itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from esper.core.place import Features
from esper.hosts.host import Host, SiteHook, row_major
from esper.hosts.inputs import Inputs


@dataclass(frozen=True)
class KeptSeed:
    """Description of a kept seed: names of its blueprint and style, its final alpha, and ``Seed.leading``.

    Raises ValueError if alpha is outside [0, 1].
    """

    blueprint: str
    style: str
    alpha: float
    leading: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}, not between 0 and 1")


class GrownHost(Host):
    """Maps inputs, as its host takes them, to logits; at each grown site i, it goes on with h_i + alpha_i · d_i(s_i).

    As a host, it has the sites of the original one, each after the seed that is built in there. Seeds train like every
    other layer, at constant alphas.

    Args:
        host: the host.
        seeds: the seed of each grown slot, by slot name.
        kept: the description of each of these seeds, by slot name.
        task: name of the task on which it was grown.
    """

    new_seeds = False
    """Whether the seeds learn where the host is frozen."""
    first_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """Shapes that tensors of the host had before seeds were merged into its layers, by name."""

    def __init__(
        self,
        host: Host,
        seeds: Mapping[str, nn.Module],
        kept: Mapping[str, KeptSeed],
        task: str,
    ) -> None:
        super().__init__()
        self.host = host
        self.seeds = nn.ModuleDict(seeds)
        self.kept = dict(kept)
        self.task = task
        self.sites = host.sites
        self.topology = host.topology
        self.in_place = host.in_place

    @property
    def possible_slots(self) -> tuple[str, ...]:
        return self.host.possible_slots

    def _use_slots(self, names: set[str]) -> None:
        """Uses these slots of the host; those whose seeds are built in stay."""
        self.host.use_slots(row_major(names | set(self.kept)))
        self.sites = self.host.sites

    def probe(self, x: Inputs) -> None:
        self.host.probe(x)
        self.sites = self.host.sites

    def follow_layers(self, x: Inputs | None = None) -> None:
        self.host.follow_layers(x)
        self.sites = self.host.sites

    def forward_with_hook(
        self,
        x: Inputs,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        return self.host.forward_with_hook(x, self._after_seeds(hook), self._free(vacant))

    def forward_from(
        self,
        x: Inputs,
        site: int,
        at: Features,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        return self.host.forward_from(x, site, at, self._after_seeds(hook), self._free(vacant))

    def _after_seeds(self, hook: SiteHook) -> SiteHook:
        def grown(site: int, at: Features) -> Tensor:
            name = self.sites[site].name
            if name in self.seeds:
                delta = self.seeds[name](at.source)
                h = torch.add(at.h, delta, alpha=self.kept[name].alpha)
                at = at.with_sink(h)
            return hook(site, at)

        return grown

    def _free(self, vacant: Collection[int]) -> set[int]:
        """Returns the ``vacant`` sites without a seed."""
        return {site for site in vacant if self.sites[site].name not in self.seeds}
