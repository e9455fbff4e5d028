"""Models of Hugging Face that have grown: their config says so, and which seeds a saved one needs.

``from_pretrained`` would load the weights that it knows, and leave the seeds out with no more than a warning. It stops
at a quantization config that names no method, so that is where the seeds are noted.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from esper.hosts.seed_hook import hooks_of, recipe_in

NEEDS = "esper.integrations.pretrained.from_pretrained"
"""The function that loads a grown model."""


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
        if seeds:
            config.quantization_config = {"needs": NEEDS, "seeds": seeds}
        elif old is not None:
            del config.quantization_config


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
