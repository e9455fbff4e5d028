"""Seeds in what is saved of a network: its state dict at any moment of growth, and the config of a grown transformer.

``from_pretrained`` of transformers would load the weights that it knows and leave the seeds out with no more than a
warning. It stops at a quantization config that names no method. The hack: the seeds are noted there.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.core.blueprints.adapted import Adapted
from esper.core.ramps import STYLES
from esper.core.site import seed_of
from esper.hosts.between import Between, place_of
from esper.hosts.container import CONTAINER, home_of
from esper.hosts.layout import Layout
from esper.hosts.seed_hook import (
    SeedHook,
    detach,
    hooks_of,
    keep,
    path_of,
    recipe_in,
    register,
)
from esper.hosts.sources import SitePath
from esper.hosts.widen import shapes_of

NEEDS = "esper.integrations.pretrained.from_pretrained"
"""The function that loads a grown model."""

RECIPE = "recipe"
"""Last part of the key under which a state says how to make a seed: JSON as uint8 [n]."""


def add_seeds(network: nn.Module, state: MutableMapping[str, Tensor]) -> None:
    """Adds to the ``state`` of ``network`` the seeds that are on, growing ones included, and how to make each."""
    hooks = [hook for _, _, hook in hooks_of(network)]
    if not hooks:
        return
    state[f"{CONTAINER}.{RECIPE}"] = _as_tensor(None)  # says that there may be seeds, also where none is on yet
    for hook in hooks:
        seed = hook.__getstate__()["seed"]
        if seed is None:
            continue
        home = home_of(network, path_of(network, hook).sink)
        beginning = ".".join(filter(None, (home, CONTAINER, hook.name))) + "."
        for key, value in seed.state_dict().items():
            state[beginning + key] = value.detach().clone()
        state[beginning + RECIPE] = _as_tensor(recipe_in(network, hook))


def _as_tensor(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def has_recipes(state: Mapping[str, Tensor]) -> bool:
    """Whether a ``state`` is that of a network that grew when it was saved, or had kept seeds."""
    return any(map(_is_recipe, state))


def _is_recipe(key: str) -> bool:
    *path, last = key.split(".")
    return last == RECIPE and CONTAINER in path


def take_seeds(
    network: nn.Module,
    state: MutableMapping[str, Tensor],
    make: bool,
    blueprints: BlueprintRegistry = BLUEPRINTS,
) -> None:
    """Gives ``network`` the seeds that a ``state`` of :func:`add_seeds` has, in place of its own.

    Their weights are loaded with the rest of the state. If seeds are not to be made, they are taken out of the state. A
    state with seeds and without recipes is for a network that has these. Raises ConfigError if a blueprint is not
    registered.
    """
    others = any(CONTAINER in key.split(".") for key in state)
    beginnings = []
    recipes = []
    for key in list(state):
        if _is_recipe(key):
            beginnings.append(key.removesuffix(RECIPE))
            recipes.append(json.loads(bytes(state.pop(key).tolist())))
    if not recipes and others:
        return
    if not make:
        for key in list(state):
            if key.startswith(tuple(beginnings)):
                del state[key]
        return
    for _, _, hook in hooks_of(network):
        detach(network, hook)
    for recipe in recipes:
        if recipe is not None:
            add_seed(network, recipe, blueprints)


def add_seed(
    network: nn.Module,
    saved: dict[str, Any],
    blueprints: BlueprintRegistry = BLUEPRINTS,
) -> None:
    """Adds a seed without its weights, from a recipe. Raises ConfigError if its blueprint is not registered here."""
    if "blueprint" not in saved:
        raise ConfigError(f"the saved model does not say what the seed at {saved['path']} was made of")
    path = SitePath.parse(saved["path"])
    known = dict(network.named_modules(remove_duplicate=False))
    try:
        blueprint = blueprints.get(saved["topology"], saved["blueprint"])
    except ValueError as error:
        raise ConfigError(f"the seed at {path} cannot be made: {error}; register it first") from None
    for part in path.paths:
        if part not in known:
            raise ConfigError(f"{type(network).__name__} has no {part}: load it by the class of the saved model")
    between = None
    if path.source is not None:
        between = Between(tuple(saved["between"]))
    layout = Layout(saved["topology"], tuple(saved.get("order", ())))
    place = place_of(network, saved["name"], int(saved["channels"]), layout, between)
    seed = seed_of(blueprint, STYLES[saved["style"]].operator, place, saved.get("leading"))
    like = next(p for p in network.parameters() if p.is_floating_point())
    seed.to(like.device, like.dtype)
    hook = SeedHook(saved["name"])
    hook.recipe = {key: value for key, value in saved.items() if key not in ("path", "name", "alpha")}
    register(network, path, hook)
    keep(network, hook, seed, float(saved["alpha"]))


def note_seeds(network: nn.Module) -> None:
    """Notes the seeds of ``network`` in the config of each model of Hugging Face in it.

    Parts of a model share its config; paths are those from the outermost one.
    """
    noted: set[int] = set()
    for model in network.modules():
        config: Any = getattr(model, "config", None)
        if not hasattr(model, "save_pretrained") or id(config) in noted:
            continue
        if isinstance(config, dict):  # of huggingface_hub's mixin
            _warn_unnoted(model)
            continue
        noted.add(id(config))
        old = getattr(config, "quantization_config", None)
        if old is not None and not is_note(old):
            continue  # a quantized model, which is loaded as such
        seeds = [recipe_in(model, hook) for _, _, hook in hooks_of(model) if hook.seed is not None]
        shapes = _note_widths(model, config) | _shapes_of_adapters(model)
        if seeds or shapes:
            config.quantization_config = note_of(seeds, shapes)
        elif old is not None:
            del config.quantization_config


def note_of(seeds: list[dict[str, Any]], shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Returns the quantization config that says how to make ``seeds``, and the ``shapes`` of wider tensors, by name."""
    return {"needs": NEEDS, "seeds": seeds, "shapes": shapes}


def _note_widths(model: nn.Module, config: Any) -> dict[str, list[int]]:
    """Gives the ``config`` of a model with merged seeds the width that its layers have now, if it can.

    A config has one width for all blocks: the entry is looked for with which the model's class makes layers of these
    shapes. Without such an entry the config stays. Returns the shapes, by name, that the class does not make of it.
    """
    made = _made_shapes(model, config)
    shapes = {name: shape for name, shape in shapes_of(model).items() if name in made}
    wider = {name: list(shape) for name, shape in shapes.items() if shape != made[name]}
    pairs = set()
    for name, shape in wider.items():
        pairs |= {(a, b) for a, b in zip(made[name], shape, strict=True) if a != b}
    if len(pairs) != 1:
        return wider  # the same shapes, or several widths
    before, after = pairs.pop()
    for key, value in config.to_dict().items():
        if value != before and key not in UNSET_WIDTHS:
            continue
        setattr(config, key, after)
        if _made_shapes(model, config) == shapes:
            return {}
        setattr(config, key, value)
    return wider


def _shapes_of_adapters(model: nn.Module) -> dict[str, list[int]]:
    """Returns the shapes of the adapters of frozen layers, by name."""
    shapes = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Adapted):
            for name, shape in shapes_of(layer.adapter).items():
                shapes[f"{path}.adapter.{name}"] = list(shape)
    return shapes


UNSET_WIDTHS = ("n_inner",)
"""Entries of configs that have a width only if it is not the default."""


def _made_shapes(model: nn.Module, config: Any) -> dict[str, torch.Size]:
    """Returns the shapes of the parameters of a new model; {} if a config alone makes none, as of PEFT's classes."""
    make: Any = type(model)
    try:
        with torch.device("meta"):
            new = make(copy.deepcopy(config))
    except Exception:  # whatever a config or a class runs into
        return {}
    return shapes_of(new)


def _warn_unnoted(model: nn.Module) -> None:
    """Warns that a model that has grown is saved without a word about its seeds."""
    if any(hook.seed is not None for _, _, hook in hooks_of(model)):
        warnings.warn(
            f"{type(model).__name__}.save_pretrained() saves seeds, but from_pretrained() would leave them out: save "
            "the model with torch.save(), or merge its seeds first if they can be merged",
            stacklevel=4,
        )


def is_note(config: object) -> bool:
    """Whether a quantization config is a note of seeds."""
    return isinstance(config, dict) and config.get("needs") == NEEDS
