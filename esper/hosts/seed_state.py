"""Seeds in the state of a network, so that a checkpoint of any moment of growth can be loaded and tested."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.hosts.seed_hook import (
    GrownSeeds,
    SeedHook,
    container_of,
    drop_container,
    hooks_of,
    keep,
    register,
    unregister,
)
from esper.lifecycle.ramps import STYLES
from esper.seeds.blend import Seed
from esper.seeds.blueprints import BLUEPRINTS, BlueprintRegistry

RECIPE = "recipe"
"""Last part of the key under which a state says how to make a seed: JSON as uint8 [n]."""


def add_seeds(network: nn.Module, state: MutableMapping[str, Tensor]) -> None:
    """Adds to the ``state`` of ``network`` the seeds that are on, growing ones included, and how to make each."""
    prefix = next((path for path, module in network.named_modules() if isinstance(module, GrownSeeds)), None)
    if prefix is None:
        return
    state[f"{prefix}.{RECIPE}"] = _as_tensor(None)  # says that there may be seeds, also where none is on yet
    for path, _, hook in hooks_of(network):
        copied = hook.__getstate__()
        if copied["seed"] is None:
            continue
        own = f"{prefix}.{hook.name}."
        state.update({f"{own}{key}": value.detach().clone() for key, value in copied["seed"].state_dict().items()})
        recipe = {"path": path, "name": hook.name, "alpha": copied["alpha"], **copied["recipe"]}
        state[f"{own}{RECIPE}"] = _as_tensor(recipe)


def _as_tensor(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def take_seeds(
    network: nn.Module, state: MutableMapping[str, Tensor], make: bool, blueprints: BlueprintRegistry = BLUEPRINTS
) -> None:
    """Gives ``network`` the seeds that a ``state`` of :func:`add_seeds` has, in place of its own.

    Their weights are loaded with the rest of the state. If seeds are not to be made, they are taken out of the state. A
    state without recipes stays as it is. Raises ConfigError if a blueprint is not registered.
    """
    found = [key for key in state if key.endswith(f".{RECIPE}")]
    recipes = [json.loads(bytes(state.pop(key).tolist())) for key in found]
    if not make:
        for key in [key for key in state if key.startswith(tuple(key.removesuffix(RECIPE) for key in found))]:
            del state[key]
        return
    if not found:
        return
    for _, module, hook in hooks_of(network):
        unregister(module, hook.name)
        container_of(network)._modules.pop(hook.name, None)
    drop_container(network)
    for recipe in recipes:
        if recipe is not None:
            add_seed(network, recipe, blueprints)


def add_seed(network: nn.Module, saved: dict[str, Any], blueprints: BlueprintRegistry = BLUEPRINTS) -> None:
    """Adds a seed without its weights, from a recipe. Raises ConfigError if its blueprint is not registered here."""
    if "blueprint" not in saved:
        raise ConfigError(f"the saved model does not say what the seed at {saved['path']} was made of")
    channels, topology = int(saved["channels"]), saved["topology"]
    try:
        blueprint = blueprints.get(topology, saved["blueprint"])
    except ValueError as error:
        raise ConfigError(f"the seed at {saved['path']} cannot be made: {error}; register it first") from None
    if saved["path"] not in dict(network.named_modules(remove_duplicate=False)):
        raise ConfigError(f"{type(network).__name__} has no {saved['path']}: load it by the class of the saved model")
    with torch.device(next(network.parameters()).device):
        seed = Seed(blueprint.build(channels), STYLES[saved["style"]].operator, channels, topology)
    hook = SeedHook(saved["name"])
    hook.recipe = {key: saved[key] for key in ("blueprint", "topology", "style", "channels")}
    container_of(network)
    register(network.get_submodule(saved["path"]), hook, hook.name)
    keep(network, hook, seed, float(saved["alpha"]))
