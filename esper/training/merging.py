"""Fossils of a host in training become a part of its layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from esper.hosts.cnn import CNNHost
from esper.hosts.example import coarsest_dtype, difference, outputs_of
from esper.hosts.graft import GraftedHost
from esper.hosts.grown import GrownHost, KeptSeed
from esper.hosts.inputs import logits_of
from esper.hosts.moments import Averages, Key, merged_averages
from esper.hosts.widen import merge_sources, seeds_of_host
from esper.training.host_training import HostTraining
from esper.training.seed_pool import ParameterGroup

MERGES = (CNNHost, GraftedHost)
"""Hosts whose layers take up seeds while they train."""


def merge_fossils(training: HostTraining, slots: Collection[str]) -> dict[str, str]:
    """Merges the fossils in ``slots`` into the layers of their host, with the state of their optimizers.

    The host computes the same as before, and its optimizer goes on with what the seeds' had. Other seeds whose features
    have grown keep to the channels that they have, or get new inputs and outputs with weights of zero. Returns the
    reason for each fossil that stays a seed, by slot.
    """
    host = training.host
    if not isinstance(host, MERGES):
        return dict.fromkeys(slots, f"a {type(host).__name__} cannot take up seeds while it trains")
    seeds: dict[str, nn.Module] = {}
    kept = {}
    stay = {}
    for site in training.sites:
        if site.planted is None:
            continue
        seeds[site.name] = site.planted.module
        kept[site.name] = KeptSeed(
            site.planted.blueprint.name,
            site.planted.style.name,
            site.alpha,
        )
        if site.name not in slots:
            stay[site.name] = "it is not to be merged"
        elif site.name in training.seed_rates:
            stay[site.name] = "its learning rate is not that of its host"
        elif not site.place.has_source:
            stay[site.name] = "it changes the output of a block"

    network = GrownHost(host, seeds, kept, "").train(host.training)
    groups = [training.host_group, *training.seed_groups.values()]
    optimizers = [group.optimizer for group in groups]
    before = dict(network.named_parameters())
    present = seeds_of_host(network)
    averages = merged_averages(present, Averages(optimizers))
    read = partial(outputs_of, network, training.sample, logits_of)
    wanted = read()
    rounding = coarsest_dtype(network)
    reasons = merge_sources(
        network,
        present,
        lambda: difference(wanted, read(), rounding),
        stay,
    )
    reasons = stay | reasons
    merged = [name for name in slots if name not in reasons]
    if merged:
        for name in merged:
            training.remove(training.site_by_name[name])
        _renew_groups(training)
        merged_state = averages(reasons)
        _take_state(
            training,
            network,
            before,
            groups,
            merged_state,
        )
        training.follow_layers()
    return {name: reasons[name] for name in slots if name in reasons}


def _renew_groups(training: HostTraining) -> None:
    """Makes new groups, without state, where a network has got new parameters."""
    training.renew_host_group()
    for name, group in training.seed_groups.items():
        site = training.site_by_name[name]
        seed = site.seed
        if seed is None or set(group.parameters) <= set(seed.parameters()):
            continue
        for parameter in seed.parameters():  # widenings learn as a whole
            parameter.requires_grad_()
        del training.pool.groups[seed]
        training.seed_groups[name] = training.group_of(
            site,
            seed,
            group.with_host,
        )


@torch.no_grad()
def _take_state(
    training: HostTraining,
    network: nn.Module,
    before: Mapping[str, nn.Parameter],
    groups: Collection[ParameterGroup],
    averages: Mapping[str, Mapping[Key, torch.Tensor]],
) -> None:
    """Gives parameters of ``network`` the merged ``averages``, and all else that was known of those ``before``."""
    known: dict[torch.Tensor, Any] = {}
    for group in groups:
        known.update(group.optimizer.state)
    states: dict[torch.Tensor, Any] = {}
    for group in (training.host_group, *training.seed_groups.values()):
        states.update(group.optimizer.state)
    for path, module in network.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            at = module, name.rpartition(".")[2]
            earlier = known[before[name]]
            for key, value in states.get(parameter, {}).items():
                merged = averages.get(key, {}).get(at, earlier.get(key))
                if merged is not None:
                    value.copy_(merged)
