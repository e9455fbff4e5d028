"""The layouts of the features at the sites of a loop's model, and whether seeds may mix positions there.

Some seeds would compute something else where they are used: generation with a cache runs a layer on the new positions
only, and the padding of a batch depends on the other samples in it. A seed that mixes the positions of a sequence would
need the layer's own cache and mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.blend import Seed
from esper.core.place import SEQUENCES, Place
from esper.grower.sites import SiteHooks, outputs_of_last
from esper.hosts.between import Trace
from esper.hosts.container import container_of, unregister_seed
from esper.hosts.example import difference
from esper.hosts.layout import Layout

MASKS = ("mask", "pad", "valid")
"""Parts of the names of arguments [B, T] that say which positions are padding; a boolean one may have any name."""


def infer_layouts(hooks: SiteHooks) -> None:
    """Infers the layouts of the sites without a declared layout, and the layers between sources and sinks.

    Raises ConfigError if the model cannot run on the last batch in eval mode.
    """
    wanted = hooks.paths
    if hooks.declared is not None:
        wanted = {name: path for name, path in wanted.items() if path.source is not None}
    if not wanted:
        return
    if hooks.passes.last is None:
        raise ConfigError(
            "no pass has called the model itself, only methods or parts of it, so that nothing shows how features lie "
            "in memory: call model(x) in the loop or in evaluate, or pass topology="
        )
    try:
        trace = Trace(hooks.model, partial(outputs_of_last, hooks), list(wanted.values()))
        layouts = trace.layouts(wanted, hooks.declared, hooks.passes.samples)
    except ConfigError as error:
        places = ", ".join(map(str, wanted.values()))
        raise ConfigError(
            f"what lies at {places} is looked up in a pass of the last batch in eval mode, which fails: {error}; "
            "sites that read their sink need no pass if topology= says what they return"
        ) from error
    for name, path in wanted.items():
        between = None if path.source is None else trace.between(path)
        hooks.place(name, trace.width(path.sink, layouts[name]), layouts[name], between)


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


def require_unnoticed(hooks: SiteHooks, name: str, seed: Seed) -> None:
    """Raises ConfigError if the model computes something else once ``seed`` is a submodule at slot ``name``.

    Kept seeds become submodules at the end of growth, which would then fail. Of a model that cannot run on the last
    batch in eval mode nothing is known.
    """
    try:
        before = outputs_of_last(hooks)
    except ConfigError:
        return
    container = container_of(hooks.model, hooks.paths[name].sink)
    container.add_module("probe", seed)
    try:
        after = outputs_of_last(hooks)
    finally:
        unregister_seed(hooks.model, seed)
    if before is None or after is None:
        return
    changed = difference(before, after)
    if changed is not None:
        raise ConfigError(
            f"the model computes something else with a seed among its submodules ({changed}): let its forward pass "
            "name the layers that it runs, and not go through children(), modules() or parameters()"
        )


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
            if isinstance(value, Tensor) and _is_mask(name, value):
                yield value
            elif isinstance(value, list | tuple):
                waiting.extend(value)
            else:
                waiting.append(value)


def _is_mask(name: object, value: Tensor) -> bool:
    """Whether an argument of a model says which positions are padding."""
    return value.dtype is torch.bool or any(part in str(name).lower() for part in MASKS)


def _hides_some(mask: Tensor) -> bool:
    """Whether a mask treats some positions in another way than others."""
    if mask.dim() != 2 or mask.numel() == 0:
        return False
    return bool((mask != mask.flatten()[0]).any())
