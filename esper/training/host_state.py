"""A host in training as plain values, between two epochs of an episode, and back: what a checkpoint has of it.

Storage stays where it is: what is loaded is copied into the tensors that are there, which captured steps know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from esper.seeds.alpha import AlphaController, AlphaCurve
from esper.seeds.blend import STYLES
from esper.seeds.blueprints import BlueprintRegistry
from esper.seeds.gate import SeedMeasurements
from esper.seeds.slot import SeedSlot
from esper.seeds.stage import SeedStage
from esper.training.env_state import ParallelEnvState
from esper.training.snapshot import network_tensors

State = dict[str, Any]
"""Nested dicts and lists of CPU tensors, numbers, strings and None."""


def host_state(env: ParallelEnvState) -> State:
    """Everything that the epochs to come of this episode depend on; copies."""
    return {
        "run_seed": env.run_seed,
        "episode": env.episode,
        "epoch": env.epoch,
        "germinations": env.germinations,
        "slots": {slot.name: _slot_state(slot) for slot in env.slots},
        "tensors": {name: tensor.detach().cpu().clone() for name, tensor in _tensors(env)},
        "scale": env.arithmetic.state_dict(),
        "generators": {name: generator.get_state() for name, generator in _generators(env).items()},
        "shadows": {name: [buffer.cpu().clone() for buffer in kept.tensors()] for name, kept in env.shadows.items()},
    }


def load_host_state(env: ParallelEnvState, state: State, blueprints: BlueprintRegistry) -> None:
    """Go on from ``state``, with the same bits as the env that it was taken from.

    The host is made as at the start of its episode and its seeds are planted again, which rebuilds the topology; every
    value is written over.
    """
    env.reset(state["run_seed"], state["episode"])
    _fill(dict(network_tensors(env, ())), state["tensors"])  # what seeds are tried on
    for slot in env.slots:
        _load_slot(env, slot, state["slots"][slot.name], blueprints)
    env.epoch, env.germinations = state["epoch"], state["germinations"]
    for name in state["shadows"]:
        env.shadow_of(env.slot_by_name[name])
    live = dict(_tensors(env))
    if live.keys() != state["tensors"].keys():
        raise ValueError(f"env {env.index}: its tensors are {sorted(live)}; saved are {sorted(state['tensors'])}")
    _fill(live, state["tensors"])
    for name, saved in state["shadows"].items():
        for buffer, value in zip(env.shadows[name].tensors(), saved, strict=True):
            buffer.copy_(value)
    env.arithmetic.load_state_dict(state["scale"])
    for name, generator in _generators(env).items():
        generator.set_state(state["generators"][name])
    env.changes.clear()  # planting was reported when it happened


def _tensors(env: ParallelEnvState) -> Iterator[tuple[str, Tensor]]:
    """Host, seeds, momentum, and whether a seed is still finite, by stable names."""
    seeds = tuple(slot.name for slot in env.slots if slot.seed is not None)
    yield from network_tensors(env, seeds)
    for name in seeds:
        finite = env.slot_by_name[name].finite
        assert finite is not None
        yield f"{name} is finite", finite


def _fill(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def _generators(env: ParallelEnvState) -> dict[str, torch.Generator]:
    return {"order": env.order, "dropout": env.dropout} | {
        f"shadow of {name}": generator
        for name, generator in env.shadow_dropout.items()
        if env.slot_by_name[name].seed is not None  # no other is drawn from again
    }


def _slot_state(slot: SeedSlot) -> State:
    styles = {style: name for name, style in STYLES.items()}
    return {
        "stage": slot.stage.name,
        "epochs_in_stage": slot.epochs_in_stage,
        "seed": None
        if slot.blueprint is None or slot.style is None
        else {
            "blueprint": slot.blueprint.name,
            "style": styles[slot.style],
            "tempo": slot.tempo,
            "target": slot.incubation_target,
        },
        "age": slot.age,
        "fading": slot.fading,
        "alpha": {**asdict(slot.alpha), "curve": slot.alpha.curve.value},
        "measured": asdict(slot.measured),
    }


def _load_slot(env: ParallelEnvState, slot: SeedSlot, state: State, blueprints: BlueprintRegistry) -> None:
    seed = state["seed"]
    if seed is not None:
        blueprint = blueprints.get(env.host.topology, seed["blueprint"])
        env.germinate(slot, blueprint, STYLES[seed["style"]], seed["tempo"], seed["target"])
    slot.stage, slot.epochs_in_stage = SeedStage[state["stage"]], state["epochs_in_stage"]
    slot.age, slot.fading = state["age"], state["fading"]
    slot.alpha = AlphaController(**{**state["alpha"], "curve": AlphaCurve(state["alpha"]["curve"])})
    slot.measured = SeedMeasurements(**state["measured"])
