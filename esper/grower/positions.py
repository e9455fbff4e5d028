"""Seeds that mix positions of sequences, in models where they would compute something else elsewhere.

Generation with a cache runs a layer on the new positions only, and the padding of a batch depends on the other samples
in it: a seed that mixes positions would need the layer's own cache and mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.hosts.layout import Layout
from esper.seeds.blend import Seed
from esper.seeds.place import Place
from esper.seeds.topologies import SEQUENCES

MASKS = ("attention_mask", "padding_mask", "key_padding_mask", "src_key_padding_mask")
"""Arguments [B, T] that say which positions are padding."""


def mixes_positions(seed: Seed, features: Tensor, place: Place) -> bool:
    """Tries whether a position of the delta for the ``features`` of a sequence at ``place`` depends on another one."""
    if features.dim() != 3 or place.topology not in SEQUENCES:
        return False
    dimension = Layout(place.topology, place.order).positions
    length = features.shape[dimension]
    if length < 2:
        return False
    mode = seed.training
    changed = features.clone()
    # Only the first position changes: the delta at the others changes with it if the seed mixes positions.
    changed.select(dimension, 0).add_(1)
    with torch.no_grad():
        seed.eval()
        before = seed(features).narrow(dimension, 1, length - 1)
        after = seed(changed).narrow(dimension, 1, length - 1)
    seed.train(mode)
    return not torch.equal(before, after)


def obstacle(
    model: nn.Module,
    topology: str,
    last: tuple[tuple[Any, ...], dict[str, Any]] | None,
) -> str | None:
    """Returns why a seed that mixes positions cannot be planted in ``model``; None if it can.

    ``last`` are the positional and named arguments of the last training pass.
    """
    if topology == "transformer" and any(map(_generates, model.modules())):
        return "the model generates with a cache of earlier positions, which the seed does not have"
    if last is None:
        return None
    arguments, keywords = last
    if any(map(_hides_some, _masks(model, arguments, keywords))):
        return "batches are padded, and the seed does not see the mask"
    return None


def _generates(module: nn.Module) -> bool:
    """Whether a model of Hugging Face generates text."""
    can_generate = getattr(module, "can_generate", None)
    return callable(can_generate) and bool(can_generate())


def _masks(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Iterator[Tensor]:
    """Yields the masks among the arguments of the model, also in dicts."""
    try:
        named = inspect.signature(model.forward).bind_partial(*arguments, **keywords).arguments
    except TypeError:
        named = keywords
    waiting: list[Any] = [named]
    while waiting:
        mapping = waiting.pop()
        if not isinstance(mapping, Mapping):
            continue
        for name, value in mapping.items():
            if isinstance(value, Tensor) and name in MASKS:
                yield value
            elif isinstance(value, list | tuple):
                waiting.extend(value)
            else:
                waiting.append(value)


def _hides_some(mask: Tensor) -> bool:
    """Whether a mask treats some positions in another way than others."""
    if mask.dim() != 2 or mask.numel() == 0:
        return False
    return bool((mask != mask.flatten()[0]).any())
