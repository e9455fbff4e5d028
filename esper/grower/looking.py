"""A look at a model in a loop of one's own before anything is planted, in a pass of its last batch in eval mode."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from esper.config import ConfigError
from esper.grower.hooks import SiteHooks
from esper.hosts.between import find_between
from esper.hosts.example import cloned, outputs_for
from esper.hosts.flops import counting
from esper.hosts.layout import Layout, Shapes, causal_where_measured
from esper.hosts.places import layout_of

logger = logging.getLogger(__name__)


def look(hooks: SiteHooks) -> None:
    """Finds the layouts of all sites that have no declared one, and the layers between sources and sinks.

    Raises ConfigError if the model cannot run on the last batch in eval mode.
    """
    with_source = {name: path for name, path in hooks.paths.items() if path.source is not None}
    wanted = with_source if hooks.declared is not None else hooks.paths
    if not wanted or hooks.passes.last is None:
        return
    shapes = Shapes()
    seen: dict[str, Tensor] = {}
    layouts: dict[str, Layout] = {}

    def see(name: str, h: Tensor) -> None:
        seen[name] = h
        layouts[name] = layout_of(
            name,
            hooks.paths[name],
            h,
            hooks.declared,
            shapes,
            hooks.passes.samples,
        )

    try:
        with shapes.watching(hooks.model), hooks.seeing(see):
            between = find_between(hooks.model, with_source, lambda: run_last(hooks))
        if hooks.declared is None:
            at_sinks = {}
            for name, path in wanted.items():
                if path.source is None:
                    at_sinks[name] = (path.sink, layouts[name])
            layouts |= causal_where_measured(hooks.model, at_sinks, lambda: run_last(hooks))
    except ConfigError as error:
        places = ", ".join(map(str, wanted.values()))
        raise ConfigError(
            f"what lies at {places} is looked up in a pass of the last batch in eval mode, which fails: {error}; "
            "sites that read their sink need no pass if topology= says what they return"
        ) from error
    for name in wanted:
        layout = layouts[name]
        hooks.place(name, layout.width_of(seen[name]), layout, between.get(name))


def count_operations(hooks: SiteHooks) -> float:
    """Returns the operations of a forward pass of the model, a sample of the last batch.

    They are 0 if nothing can be counted: the model cannot run on the batch in eval mode, or its inputs have no samples.
    """
    if hooks.passes.last is None:
        return 0.0
    try:
        with counting() as counter:
            run_last(hooks)
    except ConfigError as error:
        logger.info("the operations of a pass are not known: %s", error)
        return 0.0
    samples = hooks.passes.samples
    if not samples:
        return 0.0
    return counter.get_total_flops() / samples


def run_last(hooks: SiteHooks) -> None:
    """Runs the model on the last batch in eval mode, without compiled code, which would hide its layers."""
    arguments, keywords = cloned(hooks.passes.last)
    with torch.compiler.set_stance("force_eager"):
        outputs_for(hooks.model, arguments, keywords)
