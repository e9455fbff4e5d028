"""A forward pass at a site: what a seed reads, what it adds to, and what later layers still need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


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
