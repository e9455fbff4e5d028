"""Checks of the submodules that sites name: what can run a hook, and which dimension of their features is which."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from esper.config import ConfigError

POSITIONS = ("transformer", "encoder")
"""Topologies of features [B, T, D]."""


def check_module(model: nn.Module, name: str, path: str, topology: str) -> None:
    """Raises ConfigError if a hook on the submodule ``path`` would not act, or its features have another layout."""
    chain = list(_chain(model, path))
    module, where = chain[-1], f"slot {name}: {path}"
    for part in chain:
        if is_compiled(part):
            raise ConfigError(
                f"{where} lies in a compiled part, which does not see seeds that come and go: pass the model before "
                "torch.compile or torch.jit, and compile what grower.finish() returns"
            )
        if isinstance(part, nn.MultiheadAttention) and part is not module:
            raise ConfigError(
                f"{where} is a part of nn.MultiheadAttention, which reads its weights and never calls it: name the "
                "attention module itself, or the layer around it"
            )
    if getattr(type(module).forward, "__name__", "") == "_forward_unimplemented":
        raise ConfigError(f"{where} is a {type(module).__name__}, which is never called: name one of its items")
    if topology in POSITIONS and any(_is_time_first(part) for part in chain):
        raise ConfigError(f"{where} returns [T, B, D]: samples must come first, so make it with batch_first=True")


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of ``module`` run code that torch.compile or torch.jit made of it."""
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        return True
    if module._compiled_call_impl is not None:
        return True
    return hasattr(module.forward, "_torchdynamo_orig_callable")


def check_channels(where: str, module: nn.Module, h: Tensor) -> None:
    """Raises ConfigError if ``module`` returns images [B, H, W, C] where [B, C, H, W] is needed."""
    first = any(isinstance(layer, _IMAGE_LAYERS) and width_of(layer) == h.shape[1] for layer in module.modules())
    last = any(isinstance(layer, _LAST_LAYERS) and width_of(layer) == h.shape[-1] for layer in module.modules())
    if last and not first:
        raise ConfigError(
            f"{where} returns shape {tuple(h.shape)} with the channels last, as its layers show; cnn seeds need "
            "[B, C, H, W]: name a submodule whose output has that layout"
        )


_IMAGE_LAYERS = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm)
_LAST_LAYERS = (nn.Linear, nn.LayerNorm, nn.RMSNorm)


def width_of(layer: nn.Module) -> int | None:
    """Returns the number of channels that a layer returns; None if it does not say."""
    for attribute in ("out_channels", "out_features", "num_features", "num_channels"):
        if isinstance(width := getattr(layer, attribute, None), int):
            return width
    shape = getattr(layer, "normalized_shape", None)
    return int(shape[-1]) if shape else None


def _chain(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yields the modules on the way to the submodule ``path``, the model first."""
    module = model
    yield module
    for name in path.split("."):
        module = getattr(module, name)  # get_submodule is missing in scripted modules
        yield module


def _is_time_first(module: nn.Module) -> bool:
    """Whether a recurrent layer or transformer of torch has its samples in the second dimension."""
    if isinstance(module, nn.Sequential):
        return len(module) > 0 and _is_time_first(module[-1])
    if not type(module).__module__.startswith("torch.nn."):
        return False
    return any(getattr(layer, "batch_first", True) is False for layer in module.modules())
