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
from esper.training.host_training import HostTraining

State = dict[str, Any]
"""Nested dicts and lists of CPU tensors, numbers, strings and None."""


def host_state(training: HostTraining) -> State:
    """Returns a copy of the state needed to resume the episode."""
    return {
        "run_seed": training.run_seed,
        "episode": training.episode,
        "epoch": training.epoch,
        "germinations": training.germinations,
        "slots": {slot.name: _slot_state(slot) for slot in training.slots},
        "shadows": list(training.shadows),
        "tensors": {name: tensor.detach().cpu().clone() for name, tensor in all_tensors(training)},
        "scale": training.arithmetic.state_dict(),
        "generators": {name: generator.get_state() for name, generator in all_generators(training).items()},
    }


def load_host_state(training: HostTraining, state: State, blueprints: BlueprintRegistry) -> None:
    """Resumes from ``state``, bit-identical to the env in which it was taken.

    The host is reset to the start of its episode and its seeds are planted again, which rebuilds the topology; then
    every value is overwritten. Raises ValueError if the tensors do not match those of ``state``.
    """
    training.reset(state["run_seed"], state["episode"])
    fill(network_tensors(training, ()), state["tensors"])  # seeds are probed with these weights
    for slot in training.slots:
        _load_slot(training, slot, state["slots"][slot.name], blueprints)
    training.epoch, training.germinations = state["epoch"], state["germinations"]
    for name in state["shadows"]:
        training.shadow_of(training.slot_by_name[name])
    live = dict(all_tensors(training))
    if live.keys() != state["tensors"].keys():
        raise ValueError(f"env {training.index}: its tensors are {sorted(live)}; saved are {sorted(state['tensors'])}")
    fill(live.items(), state["tensors"])
    training.arithmetic.load_state_dict(state["scale"])
    for name, generator in all_generators(training).items():
        generator.set_state(state["generators"][name])
    training.changes.clear()  # the original germinations were already reported


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


def _load_slot(training: HostTraining, slot: SeedSlot, state: State, blueprints: BlueprintRegistry) -> None:
    seed = state["seed"]
    if seed is not None:
        blueprint = blueprints.get(training.host.topology, seed["blueprint"])
        training.germinate(slot, blueprint, STYLES[seed["style"]], seed["tempo"], seed["target"])
    slot.stage, slot.epochs_in_stage = SeedStage[state["stage"]], state["epochs_in_stage"]
    slot.age, slot.fading = state["age"], state["fading"]
    slot.alpha = AlphaController(**{**state["alpha"], "curve": AlphaCurve(state["alpha"]["curve"])})
    slot.measured = SeedMeasurements(**state["measured"])
