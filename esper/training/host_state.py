"""Saving and loading a training host between two epochs, as plain values, for checkpoints.

Loading copies into the existing tensors, because captured steps refer to their storage.
"""

from __future__ import annotations

from typing import Any

from esper.lifecycle.ramps import STYLES
from esper.seeds.blueprints import BlueprintRegistry
from esper.training.contents import all_generators, all_tensors, fill, network_tensors
from esper.training.host_training import HostTraining

State = dict[str, Any]
"""Nested dicts and lists of CPU tensors, numbers, strings and None."""


def host_state(training: HostTraining) -> State:
    """Returns a copy of the state needed to resume the episode; roles and alphas of sites are the caller's."""
    styles = {style: name for name, style in STYLES.items()}
    return {
        "run_seed": training.run_seed,
        "episode": training.episode,
        "epoch": training.epoch,
        "germinations": training.germinations,
        "seeds": {
            site.name: (site.blueprint.name, styles[site.style])
            for site in training.sites
            if site.blueprint is not None and site.style is not None
        },
        "shadows": list(training.shadows),
        "tensors": {name: tensor.detach().cpu().clone() for name, tensor in all_tensors(training)},
        "scale": training.arithmetic.state_dict(),
        "generators": {name: generator.get_state() for name, generator in all_generators(training).items()},
    }


def load_host_state(training: HostTraining, state: State, blueprints: BlueprintRegistry) -> None:
    """Resumes from ``state``, bit-identical to the host in which it was taken.

    The host is reset to the start of its episode and its seeds are planted again, which rebuilds the topology; then
    every value is overwritten. Raises ValueError if the tensors do not match those of ``state``.
    """
    training.reset(state["run_seed"], state["episode"])
    fill(network_tensors(training, ()), state["tensors"])  # seeds are probed with these weights
    for site in training.sites:
        if site.name in state["seeds"]:
            blueprint, style = state["seeds"][site.name]
            training.germinate(site, blueprints.get(training.host.topology, blueprint), STYLES[style])
    training.epoch, training.germinations = state["epoch"], state["germinations"]
    for name in state["shadows"]:
        training.shadow_of(training.site_by_name[name])
    live = dict(all_tensors(training))
    if live.keys() != state["tensors"].keys():
        raise ValueError(f"env {training.index}: its tensors are {sorted(live)}; saved are {sorted(state['tensors'])}")
    fill(live.items(), state["tensors"])
    training.arithmetic.load_state_dict(state["scale"])
    for name, generator in all_generators(training).items():
        generator.set_state(state["generators"][name])
