"""Merges of fossils in the hosts of an env, what is taken back of them, and the sizes of hosts and seeds after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from esper.core.site import PlantedSeed, Site
from esper.core.slots import Bools
from esper.core.state import Choices
from esper.env.backend import Merge, Release
from esper.env.catalog import BlueprintCatalog
from esper.hosts.host import Host
from esper.hosts.widen import resize, shapes_of
from esper.training.host_training import HostTraining
from esper.training.merging import merge_fossils, rate_rises, release, removable_units
from esper.training.rng import seeded

Shapes = dict[str, torch.Size]
"""Shapes of a host's tensors, by name."""


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
        """Merges the fossils of a host that are ``due`` [S]; returns None if all stay.

        One whose learning rate still rises waits until it is its host's.
        ``sites`` are those of the slots.
        """
        count = len(sites)
        slots = np.zeros(count, dtype=np.bool_)
        parameters = np.zeros(count, dtype=np.int64)
        flops = np.zeros(count)
        places: dict[str, int] = {}
        seeds: dict[str, PlantedSeed] = {}
        for s in np.flatnonzero(due).tolist():
            site = sites[s]
            seed = site.planted
            if seed is not None and not seed.stays and not rate_rises(training, site.name):
                places[site.name] = s
                seeds[site.name] = seed
        if not seeds:
            return None
        before = self.sizes_of(training)
        shapes: dict[str, Shapes] = {}

        def note(slot: str) -> None:
            shapes.pop(slot, None)  # so that the last merges are the last ones
            shapes[slot] = shapes_of(training.host)

        reasons = merge_fossils(training, list(seeds), note)
        for name, reason in reasons.items():
            seeds[name].stays = reason
        for name, of_host in shapes.items():
            if name in reasons:
                continue
            after = self._sizes_at(of_host, training)
            s = places[name]
            slots[s] = True
            parameters[s] = after.host_parameters - before.host_parameters
            flops[s] = after.host_flops - before.host_flops
            before = after
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
        if self._first is None:
            new = self._new_host(training)
            # The catalog's own places are those of a host that may have grown before a stop.
            self._first = self.catalog.at(new.sites).choices(
                new,
                training.sample,
                training.config.env.at_once,
            )
            self._sizes[_key(shapes_of(new))] = self._first
        return self._first

    def sizes_of(self, training: HostTraining) -> Choices:
        """Returns the sizes of a host and of its possible seeds; hosts with equal layers have the same."""
        return self._sizes_at(shapes_of(training.host), training)

    def _sizes_at(self, shapes: Shapes, training: HostTraining) -> Choices:
        """Returns the sizes that the host has, or would have, with tensors of these ``shapes``."""
        first = self.sizes_of_new(training)
        key = _key(shapes)
        if key not in self._sizes:
            host = training.host
            if shapes_of(host) != shapes:  # it has grown on since
                host = self._new_host(training)
                resize(host, shapes)
                host.follow_layers(training.sample)
            self._sizes[key] = self.catalog.grown(
                host,
                training.sample,
                first,
            )
        return self._sizes[key]

    def _new_host(self, training: HostTraining) -> Host:
        with seeded(0):
            new = training.task.new_host(training.config.env.slots)
        new.to(training.device)
        new.probe(training.sample)
        return new


def _key(shapes: Shapes) -> tuple[torch.Size, ...]:
    return tuple(shapes.values())
