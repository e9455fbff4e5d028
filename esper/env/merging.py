"""Merges of fossils in the hosts of an env, what is taken back of them, and the sizes of hosts and seeds after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from esper.core.site import Site
from esper.core.slots import Bools
from esper.core.state import Choices
from esper.env.backend import Merge, Release
from esper.env.catalog import BlueprintCatalog
from esper.hosts.host import Host
from esper.hosts.widen import shapes_of
from esper.training.host_training import HostTraining
from esper.training.merging import merge_fossils, rate_rises, release, removable_units
from esper.training.rng import seeded


class Merger:
    """Merges fossils into the layers of hosts of one architecture, and takes units out of these again.

    Args:
        catalog: the seeds that can be planted in a new host.
    """

    def __init__(self, catalog: BlueprintCatalog) -> None:
        self.catalog = catalog
        self._first: Choices | None = None
        """Sizes of a new host, and of its possible seeds."""
        self._sizes: dict[tuple[torch.Size, ...], Choices] = {}
        """The same of grown hosts, by the shapes of their tensors."""

    def merge(
        self,
        training: HostTraining,
        sites: Sequence[Site],
        due: Bools,
    ) -> Merge | None:
        """Merges the fossils of a host that are ``due`` [S], one after the other; returns None if all stay.

        One whose learning rate still rises waits until it is its host's.
        ``sites`` are those of the slots.
        """
        count = len(sites)
        slots = np.zeros(count, dtype=np.bool_)
        parameters = np.zeros(count, dtype=np.int64)
        flops = np.zeros(count)
        for s in np.flatnonzero(due).tolist():
            site = sites[s]
            seed = site.planted
            if seed is None or seed.stays or rate_rises(training, site.name):
                continue
            before = self.sizes_of(training)
            reasons = merge_fossils(training, [site.name])
            seed.stays = reasons.get(site.name, "")
            if seed.stays:
                continue
            after = self.sizes_of(training)
            slots[s] = True
            parameters[s] = after.host_parameters - before.host_parameters
            flops[s] = after.host_flops - before.host_flops
        if not slots.any():
            return None
        return Merge(slots, parameters, flops, self.choices_of(training))

    def release(
        self,
        training: HostTraining,
        slot: str,
    ) -> Release:
        """Takes the units of the last merge in ``slot`` out of the layers of a host."""
        before = self.sizes_of(training)
        release(training, slot, self.catalog.registry)
        after = self.choices_of(training)
        site = training.site_by_name[slot]
        if site.planted is None:
            raise RuntimeError(f"{slot}: its units were not planted")
        return Release(
            slot=self.catalog.spec.slots.index(slot),
            blueprint=self.catalog.spec.blueprints.index(site.planted.blueprint.name),
            size=site.parameters,
            parameters=before.host_parameters - after.host_parameters,
            flops=before.host_flops - after.host_flops,
            now=after,
        )

    def choices_of(self, training: HostTraining) -> Choices:
        """Returns the sizes of a host and of its possible seeds, and how many units could be taken out."""
        removable = [removable_units(training, slot) for slot in self.catalog.spec.slots]
        return replace(self.sizes_of(training), removable=np.array(removable))

    def sizes_of_new(self, training: HostTraining) -> Choices:
        """Returns the sizes of the host as it was when it was new, and of its possible seeds."""
        config = training.config.env
        if self._first is None:
            with seeded(0):
                new = training.task.new_host(config.slots)
            new.to(training.device)
            new.probe(training.sample)
            # The catalog's own places are those of a host that may have grown before a stop.
            self._first = self.catalog.at(new.sites).choices(
                new,
                training.sample,
                config.at_once,
            )
            self._sizes[_shapes(new)] = self._first
        return self._first

    def sizes_of(self, training: HostTraining) -> Choices:
        """Returns the sizes of a host and of its possible seeds; hosts with equal layers have the same."""
        first = self.sizes_of_new(training)
        shapes = _shapes(training.host)
        if shapes not in self._sizes:
            self._sizes[shapes] = self.catalog.grown(
                training.host,
                training.sample,
                first,
            )
        return self._sizes[shapes]


def _shapes(host: Host) -> tuple[torch.Size, ...]:
    return tuple(shapes_of(host).values())
