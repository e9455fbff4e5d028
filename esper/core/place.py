"""The places of seeds in a host: what a forward pass shows there, and the layouts of features, samples first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True)
class Place:
    """The place of a slot in a host."""

    name: str
    channels: int
    """Number of channels of its sink, the features to which a seed adds. That of its source is what the first of
    ``layers`` reads, see ``esper.core.blueprints.source.inputs_of``."""
    has_source: bool = False
    """Whether a seed reads earlier features than those to which it adds."""
    layers: tuple[nn.Module, ...] = field(default=(), compare=False)
    """Layers of the host from the source to the sink, in order, if they are known."""
    obstacle: str = field(default="", compare=False)
    """The reason for unknown layers of the place; empty if they are known."""
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


@dataclass(frozen=True)
class Features:
    """A forward pass at a site: all that the rest of the network is computed from, besides the inputs."""

    h: Tensor
    """Features at the sink of the site, to which its seed adds."""
    source: Tensor
    """Features that the seed reads: ``h``, or earlier ones if the site has a source of its own."""
    earlier: Mapping[int, Tensor] = field(default_factory=dict)
    """Earlier features that later sites read, by a number that the host gives them."""

    @classmethod
    def at_sink(cls, h: Tensor) -> Features:
        """Features ``h`` of a site that reads its sink, in a network whose later sites do, too."""
        return cls(h, h)

    def with_sink(self, h: Tensor) -> Features:
        """Returns the same pass with other features at the sink."""
        source = self.source
        if source is self.h:
            source = h
        return Features(h, source, dict(self.earlier))

    def each(self, change: Callable[[Tensor], Tensor]) -> Features:
        """Returns the same pass with ``change`` applied to all features."""
        h = change(self.h)
        source = h
        if self.source is not self.h:
            source = change(self.source)
        earlier = {number: change(value) for number, value in self.earlier.items()}
        return Features(h, source, earlier)


SPATIAL: Mapping[str, int] = {"cnn": 2, "cnn1d": 1, "cnn3d": 3}
"""Number of spatial dimensions of features [B, C, ...], by topology."""

SEQUENCES = ("transformer", "encoder")
"""Topologies of features [B, T, D]: no position sees a later one, or each sees all."""

LAYOUTS: Mapping[str, tuple[int, int]] = {
    **{topology: (2 + dims, 1) for topology, dims in SPATIAL.items()},
    **dict.fromkeys(SEQUENCES, (3, 2)),
    "mlp": (2, 1),
}
"""Rank of the features and the index of their channel dimension, by topology."""


def words_of(topology: str, order: tuple[int, ...] = ()) -> str:
    """Returns the names of the dimensions of features in words, such as ``[N, C, H, W]``.

    ``order`` are the dimensions in the order that seeds expect, see :class:`Place`.
    """
    names = {
        "cnn1d": "N C T",
        "cnn": "N C H W",
        "cnn3d": "N C D H W",
        **dict.fromkeys(SEQUENCES, "N T D"),
        "mlp": "N D",
    }[topology].split()
    places = order or tuple(range(len(names)))
    return f"[{', '.join(names[places.index(place)] for place in range(len(names)))}]"
