"""Fossils of a host in training become a part of its layers, and units of its layers become seeds again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from esper.core.blend import Seed
from esper.core.blueprints import BlueprintRegistry
from esper.core.blueprints.adapted import adapter_pairs, raises_rank, rank_of
from esper.core.blueprints.source import Deeper, Extensible, Shrinkable, width_of
from esper.core.place import Place
from esper.core.ramps import STYLES
from esper.hosts.cnn import CNNHost
from esper.hosts.example import coarsest_dtype, difference, outputs_of
from esper.hosts.graft import GraftedHost
from esper.hosts.grown import GrownHost, KeptSeed
from esper.hosts.inputs import logits_of
from esper.hosts.merge import last_layer, merge_linear, obstacle_to_linear
from esper.hosts.moments import Averages, Key, merged_averages, twin_of
from esper.hosts.shrink import take_units
from esper.hosts.transformer import TransformerHost
from esper.hosts.widen import changed_by, merge_sources, seeds_of_host
from esper.training.host_training import HostTraining, LayerGrowth
from esper.training.seed_pool import ParameterGroup

MERGES = (CNNHost, GraftedHost, TransformerHost)
"""Hosts whose layers take up seeds while they train."""


def rate_rises(training: HostTraining, slot: str) -> bool:
    """Whether the learning rate of the seed in a slot still rises to ``task.seed_rate`` times the host's."""
    rate = training.seed_rates.get(slot)
    return rate is not None and rate.rises(training.epoch - training.planted_at[slot])


def _reasons_to_stay(training: HostTraining, slots: Collection[str]) -> dict[str, str]:
    """Returns the reason for each seed that is not to be merged now, without a look at its layers."""
    reasons = {}
    for site in training.sites:
        if site.planted is None:
            continue
        frozen = training.config.task.freeze != "nothing"
        if site.name not in slots:
            reasons[site.name] = "it is not to be merged"
        elif training.config.task.seed_rate != 1 or rate_rises(training, site.name):
            reasons[site.name] = "its learning rate is not that of its host"
        elif frozen and not raises_rank(site.planted.blueprint.name, site.place.layers):
            reasons[site.name] = "layers of its host are frozen, and the seed is not"
    return reasons


def _grown(training: HostTraining) -> GrownHost:
    """Returns the host with its seeds, in the mode that it has."""
    seeds: dict[str, Seed] = {}
    kept = {}
    for site in training.sites:
        if site.planted is None:
            continue
        seeds[site.name] = site.planted.module
        kept[site.name] = KeptSeed(
            site.planted.blueprint.name,
            site.planted.style.name,
            site.alpha,
        )
    return GrownHost(training.host, seeds, kept, "").train(training.host.training)


def merge_fossils(
    training: HostTraining,
    slots: Collection[str],
    note: Callable[[str], None] = lambda _slot: None,
) -> dict[str, str]:
    """Merges the fossils in ``slots`` into the layers of their host, with the state of their optimizers.

    The host computes the same as before, and its optimizer goes on with what the seeds' had. LoRAs of frozen layers
    become a part of the layers' adapters, and learn on. Other seeds whose features have grown keep to the channels that
    they have, or get new inputs and outputs with weights of zero. ``note`` is called with each slot while the layers
    are as its merge leaves them. Returns the reason for each fossil that stays a seed, by slot.
    """
    host = training.host
    if not isinstance(host, MERGES):
        return dict.fromkeys(slots, f"a {type(host).__name__} cannot take up seeds while it trains")
    stay = _reasons_to_stay(training, slots)
    adapted = {}
    for site in training.sites:
        if site.planted is None or site.name in stay:
            continue
        if raises_rank(site.planted.blueprint.name, site.place.layers):
            adapted[site.name] = site.place.layers[0]
    first = {name: training.site_by_name[name].seed for name, layer in adapted.items() if not rank_of(layer)}
    network = _grown(training)
    kept = dict(network.kept)
    groups = [training.host_group, *training.seed_groups.values()]
    before = dict(network.named_parameters())
    present = [replace(seed, beside=seed.name in adapted) for seed in seeds_of_host(network)]
    averages = merged_averages(present, Averages(group.optimizer for group in groups))
    read = partial(outputs_of, network, training.sample, logits_of)
    wanted = read()
    rounding = coarsest_dtype(network)
    widths = _widths_of(training)
    growths: dict[str, LayerGrowth] = {}

    def changes() -> str | None:
        return difference(wanted, read(), rounding)

    def merged_one(name: str) -> None:
        width = widths.get(name, 0)
        widths.update(_widths_of(training))
        growths[name] = LayerGrowth(kept[name].blueprint, width, widths.get(name, 0))
        note(name)

    merge = partial(merge_sources, network, present, stay=stay, note=merged_one)
    reasons: dict[str, str] = {}
    due = [seed for seed in present if seed.name not in stay]
    if len(due) < 2:
        reasons.update(merge(changes))
    elif changed_by(network, lambda: reasons.update(merge(None)), changes):
        reasons = {}
        for slot in slots:  # one by one, to find which of them changes outputs
            reasons |= merge_fossils(training, [slot], note)
        return reasons
    reasons |= stay
    copied: dict[torch.Tensor, torch.Tensor] = {}
    for name, seed in first.items():
        if name not in reasons and seed is not None:
            copied.update(adapter_pairs(adapted[name], seed))
    for name in slots:
        if name in stay or training.site_by_name[name].place.has_source:
            continue
        reason = merge_residual(network, name, changes, copied)
        if reason:
            reasons[name] = reason
        else:
            merged_one(name)
    merged = [name for name in slots if name not in reasons]
    if merged:
        for name in merged:
            _empty(training, name, growths[name])
        _renew_groups(training)
        state = averages(reasons)
        _take_state(training, network, before, groups, state, copied)
        training.follow_layers()
    return {name: reasons[name] for name in slots if name in reasons}


def _widths_of(training: HostTraining) -> dict[str, int]:
    """Returns the widths of the layers that have one, by slot."""
    return {name: width_of(place.layers[0]) for name, place in places_of(training).items()}


def _empty(training: HostTraining, slot: str, growth: LayerGrowth) -> None:
    """Notes that the seed in ``slot`` has become a part of its layer."""
    site = training.site_by_name[slot]
    training.growths.setdefault(slot, []).append(growth)
    seed = site.seed
    if seed is not None and not _holds(training.seed_groups[slot], seed):
        del training.pool.groups[seed]
    training.remove(site)


def _holds(group: ParameterGroup, seed: Seed) -> bool:
    """Whether the parameters of ``group`` still are those of ``seed``: earlier merges may have replaced some."""
    return set(group.parameters) <= set(seed.parameters())


def merge_residual(
    network: GrownHost,
    name: str,
    changes: Callable[[], str | None],
    copied: dict[torch.Tensor, torch.Tensor],
) -> str | None:
    """Merges a seed that reads its sink into ``network``: blocks become blocks of its host, and what is linear in a
    layer changes its weights.

    ``changes`` says how the outputs have changed. Adds to ``copied`` the parameters that are there now, with those of
    the seed that they are copies of. Returns the reason if it stays.
    """
    seed = network.seeds[name]
    host = network.host
    assert isinstance(seed, Seed)
    body = seed.body
    if isinstance(host, GraftedHost):
        return _merge_linear(network, name, changes)
    if not isinstance(body, Deeper) or not isinstance(host, TransformerHost):
        return "it changes the output of a block, and is not linear in what a layer computes"
    if network.kept[name].alpha != 1:
        return f"its alpha is {network.kept[name].alpha:g}: a block adds all of its change"
    blocks = list(map(copy.deepcopy, body.blocks))

    def merge() -> None:
        del network.seeds[name]
        del network.kept[name]
        host.deepen(name, blocks)

    found = changed_by(network, merge, changes)
    if found:
        return f"something else happens behind its block: merged, {found}"
    pairs = zip(nn.ModuleList(blocks).parameters(), body.blocks.parameters(), strict=True)
    copied.update(pairs)
    return None


def _merge_linear(
    network: GrownHost,
    name: str,
    changes: Callable[[], str | None],
) -> str | None:
    """Merges a seed into the weights of the layer that it reads; see :func:`merge_residual`."""
    seed = network.seeds[name]
    alpha = network.kept[name].alpha
    assert isinstance(seed, Seed)
    assert isinstance(network.host, GraftedHost)
    model = network.host.model
    layer = last_layer(model.get_submodule(network.host.paths[name]))
    reason = obstacle_to_linear(model, seed, layer)
    if reason is not None:
        return reason
    if getattr(layer, "bias", None) is None:
        for module in seed.body.modules():
            if getattr(module, "bias", None) is not None:
                return "it has a bias, and its layer has none"

    def merge() -> None:
        del network.seeds[name]
        del network.kept[name]
        merge_linear(seed, alpha, layer)

    found = changed_by(network, merge, changes)
    if found:
        return f"something else uses the weights of its layer or changes its output: merged, {found}"
    return None


def places_of(training: HostTraining) -> dict[str, Place]:
    """Returns the places with a source whose layers are known, by slot."""
    return {site.name: site.place for site in training.sites if site.place.layers and site.place.has_source}


def removable_units(training: HostTraining, slot: str) -> int:
    """Returns the number of units that the last merge in ``slot`` has added, if they are the last ones of their layer;
    0 if there are none that :func:`release` can take out."""
    growths = training.growths.get(slot)
    if not growths or growths[-1].after == growths[-1].before:
        return 0
    last = growths[-1]
    (first, *_) = training.site_by_name[slot].place.layers
    if isinstance(first, Extensible) and not isinstance(first, Shrinkable):
        return 0
    if width_of(first) != last.after:  # another slot has widened the same layer since
        return 0
    return last.after - last.before


def release(training: HostTraining, slot: str, blueprints: BlueprintRegistry) -> None:
    """Takes the units of the last merge in ``slot`` out of the layers of its host, and plants them beside it as a seed.

    The host with the seed at alpha 1 computes the same as before. The averages of the units' gradients go. No other
    seed may use the units. Raises ValueError if there are none.
    """
    units = removable_units(training, slot)
    if not units:
        raise ValueError(f"{slot} has no units that could be taken out of its layers")
    host = training.host
    site = training.site_by_name[slot]
    growth = training.growths[slot].pop()
    before = dict(host.named_parameters())
    groups = [training.host_group, *training.seed_groups.values()]
    averages = Averages(group.optimizer for group in groups)
    rest: dict[str, dict[Key, torch.Tensor]] = {}
    for key in averages.keys:
        modules: dict[nn.Module, nn.Module] = {}
        layers = [twin_of(layer, averages, key, modules) for layer in site.place.layers]
        take_units(layers, units)
        rest[key] = {
            (original, name): value.data
            for original, twin in modules.items()
            for name, value in twin.named_parameters(recurse=False)
        }
    state = take_units(site.place.layers, units)
    training.renew_host_group()
    _take_state(
        training,
        host,
        before,
        groups,
        rest,
    )
    training.follow_layers()
    recipe = blueprints.at(host.topology, site.place, growth.blueprint)
    training.plant(site, recipe, STYLES["LINEAR_ADD"])
    if site.seed is None:
        raise RuntimeError(f"{slot}: its units were not planted")
    body = site.seed.body
    body.load_state_dict({**body.state_dict(), **state})


def _renew_groups(training: HostTraining) -> None:
    """Makes new groups, without state, where a network has got new parameters."""
    training.renew_host_group()
    for name, group in training.seed_groups.items():
        site = training.site_by_name[name]
        seed = site.seed
        if seed is None or _holds(group, seed):
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
    copied: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Gives parameters of ``network`` the merged ``averages``, and all else that was known of those ``before``.

    Those of ``copied`` have the state of others, which they are copies of.
    """
    known: dict[torch.Tensor, Any] = {}
    for group in groups:
        known.update(group.optimizer.state)
    states: dict[torch.Tensor, Any] = {}
    for group in (training.host_group, *training.seed_groups.values()):
        states.update(group.optimizer.state)
    for path, module in network.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            at = module, name.rpartition(".")[2]
            original = copied[parameter] if parameter in copied else before[name]
            earlier = known[original]
            for key, value in states.get(parameter, {}).items():
                merged = averages.get(key, {}).get(at, earlier.get(key))
                if merged is not None:
                    value.copy_(merged)
