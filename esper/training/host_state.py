"""The state of a host in training by stable names; copies of it for checkpoints and for repeated epochs.

Restoring copies into the existing tensors, because captured steps refer to their memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from esper.core.blueprints import BlueprintRegistry
from esper.core.ramps import STYLES
from esper.training.host_training import HostTraining, shapes_in
from esper.training.snapshot import cpu_copy, fill

State = dict[str, Any]
"""Nested dicts and lists of CPU tensors, numbers, strings and None."""


def all_tensors(training: HostTraining) -> Iterator[tuple[str, Tensor]]:
    """Yields all that training writes and later epochs read: networks, flags of finite seeds, buffers of shadows."""
    yield from training.network_tensors(site.name for site in training.sites if site.seed is not None)
    for site in training.sites:
        if site.planted is not None:
            yield f"{site.name} is finite", site.planted.finite
    for name, shadow in training.shadows.items():
        for index, buffer in enumerate(shadow.tensors()):
            yield f"{name}.shadow.{index}", buffer


def generators_of(training: HostTraining) -> dict[str, torch.Generator]:
    """Returns the generators that are drawn from again; that of a removed seed is not."""
    generators = {"order": training.order, "dropout": training.dropout}
    for name, generator in training.shadow_dropout.items():
        if training.site_by_name[name].seed is not None:
            generators[f"{name}.shadow"] = generator
    return generators


def host_state(training: HostTraining) -> State:
    """All that is needed to resume the episode, with copies of its tensors.

    Roles and alphas of sites are the caller's.
    """
    seeds = {}
    for site in training.sites:
        if site.planted is not None:
            planted = site.planted
            seeds[site.name] = (planted.blueprint.name, planted.style.name, planted.module.leading)
    return {
        "run_seed": training.run_seed,
        "episode": training.episode,
        "epoch": training.epoch,
        "germinations": training.germinations,
        "seeds": seeds,
        "grown": training.grown,
        "layers": training.layers(),
        "planted_at": dict(training.planted_at),
        "shadows": list(training.shadows),
        "tensors": {name: cpu_copy(tensor) for name, tensor in all_tensors(training)},
        "scale": training.arithmetic.state_dict(),
        "generators": {name: generator.get_state() for name, generator in generators_of(training).items()},
    }


def restore_host_state(training: HostTraining, state: State) -> None:
    """Restores, bit for bit, a host that has the seeds of ``state``; drops its gradients and later shadow buffers."""
    training.epoch = state["epoch"]
    training.germinations = state["germinations"]
    training.batch = 0
    training.part = 0
    training.drop_gradients()
    # Shadow buffers that were not saved would keep values of later epochs.
    for name in training.shadows.keys() - set(state["shadows"]):
        del training.shadows[name]
    training.arithmetic.load_state_dict(state["scale"])
    for name, generator in generators_of(training).items():
        generator.set_state(state["generators"][name])
    fill(all_tensors(training), state["tensors"])


def load_host_state(
    training: HostTraining,
    state: State,
    blueprints: BlueprintRegistry,
) -> None:
    """Resumes from ``state``, bit-identical to the host in which it was taken.

    The host is reset to the start of its episode and its seeds are planted again, which rebuilds the topology; then
    every value is overwritten. Raises ValueError if the tensors do not match those of ``state``.
    """
    training.reset(state["run_seed"], state["episode"])
    if state["grown"]:
        training.take_shapes(shapes_in(state["tensors"]))
    training.take_layers(state["layers"])
    fill(training.network_tensors(()), state["tensors"])  # seeds are probed with these weights
    for site in training.sites:
        if site.name not in state["seeds"]:
            continue
        blueprint, style, leading = state["seeds"][site.name]
        recipe = blueprints.at(
            training.host.topology,
            site.place,
            blueprint,
        )
        training.plant(site, recipe, STYLES[style], leading)
    training.planted_at.update(state["planted_at"])
    for name in state["shadows"]:
        training.shadow_of(training.site_by_name[name])
    live = dict(all_tensors(training))
    if live.keys() != state["tensors"].keys():
        raise ValueError(f"env {training.index}: its tensors are {sorted(live)}; saved are {sorted(state['tensors'])}")
    restore_host_state(training, state)
