"""Saving and loading a training host between two epochs, as plain values, for checkpoints.

Loading copies into the existing tensors, because captured steps refer to their storage.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from esper.seeds.alpha import AlphaController, AlphaCurve
from esper.seeds.blend import STYLES
from esper.seeds.blueprints import BlueprintRegistry
from esper.seeds.gate import SeedMeasurements
from esper.seeds.slot import SeedSlot
from esper.seeds.stage import SeedStage
from esper.training.contents import all_generators, all_tensors, fill, network_tensors
from esper.training.env_state import ParallelEnvState

State = dict[str, Any]
"""Nested dicts and lists of CPU tensors, numbers, strings and None."""


def host_state(env: ParallelEnvState) -> State:
    """Returns a copy of the state needed to resume the episode."""
    return {
        "run_seed": env.run_seed,
        "episode": env.episode,
        "epoch": env.epoch,
        "germinations": env.germinations,
        "slots": {slot.name: _slot_state(slot) for slot in env.slots},
        "shadows": list(env.shadows),
        "tensors": {name: tensor.detach().cpu().clone() for name, tensor in all_tensors(env)},
        "scale": env.arithmetic.state_dict(),
        "generators": {name: generator.get_state() for name, generator in all_generators(env).items()},
    }


def load_host_state(env: ParallelEnvState, state: State, blueprints: BlueprintRegistry) -> None:
    """Resumes from ``state``, bit-identical to the env in which it was taken.

    The host is reset to the start of its episode and its seeds are planted again, which rebuilds the topology; then
    every value is overwritten. Raises ValueError if the tensors do not match those of ``state``.
    """
    env.reset(state["run_seed"], state["episode"])
    fill(network_tensors(env, ()), state["tensors"])  # seeds are probed with these weights
    for slot in env.slots:
        _load_slot(env, slot, state["slots"][slot.name], blueprints)
    env.epoch, env.germinations = state["epoch"], state["germinations"]
    for name in state["shadows"]:
        env.shadow_of(env.slot_by_name[name])
    live = dict(all_tensors(env))
    if live.keys() != state["tensors"].keys():
        raise ValueError(f"env {env.index}: its tensors are {sorted(live)}; saved are {sorted(state['tensors'])}")
    fill(live.items(), state["tensors"])
    env.arithmetic.load_state_dict(state["scale"])
    for name, generator in all_generators(env).items():
        generator.set_state(state["generators"][name])
    env.changes.clear()  # the original germinations were already reported


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
