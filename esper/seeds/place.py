"""The places of seeds in a host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Place:
    """The place of a slot in a host."""

    name: str
    channels: int
    """Number of channels of its sink, the features to which a seed adds. That of its source is what the first of
    ``layers`` reads, see ``esper.seeds.blueprints.source.inputs_of``."""
    has_source: bool = False
    """Whether a seed reads earlier features than those to which it adds."""
    layers: tuple[nn.Module, ...] = field(default=(), compare=False)
    """Layers of the host from the source to the sink, in order, if they are known."""
    obstacle: str = field(default="", compare=False)
    """The reason why there are layers that are not known; "": there is none."""
    group: tuple[nn.Module, ...] = field(default=(), compare=False)
    """Blocks of the host right before the sink, in order, that return features of the shape that they read."""
    stack: tuple[nn.Module, ...] = field(default=(), compare=False)
    """All such blocks of the host, if the sink lies behind the last one."""
    topology: str = ""
    """Kind of blueprints that fit, as in ``Host.topology``; "": that of the host."""
    order: tuple[int, ...] = ()
    """Dimensions of its features in the order that seeds expect, such as (0, 3, 1, 2) for images [B, H, W, C]; (): they
    have that order. A seed made for its place gets and returns features as the host has them."""
    draw: Callable[[nn.Module], None] | None = field(default=None, compare=False)
    """Draws the weights of new layers as those of the host's own are; None: as torch does."""
