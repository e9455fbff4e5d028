"""The host interface: a network with sites that features pass in a fixed order."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from esper.hosts.inputs import Inputs, gathered
from esper.seeds.site import SlotSite

Run = Callable[[nn.Module, Tensor], Tensor]
"""Runs a segment on its input features and returns its output."""
SiteHook = Callable[[int, Tensor], Tensor]
"""Called at each site with its index in execution order and its features; returns the features to continue with."""


class Host(nn.Module, ABC):
    """A network whose features can be changed at its sites, 0 ... S−1 in execution order."""

    sites: tuple[SlotSite, ...]
    topology: str
    """Kind of blueprints that fit: ``cnn`` (features [B, C, H, W]), ``transformer`` and, if all positions are seen,
    ``encoder`` ([B, T, D]), ``mlp`` ([B, D])."""
    in_place = False
    """Whether layers may change a site's features in place afterwards, so that they must be copied to be kept."""

    @abstractmethod
    def forward_with_hook(self, x: Inputs, hook: SiteHook, vacant: Collection[int] = ()) -> Tensor:
        """Maps inputs x [B, ...] to logits, [B, classes] or [B, T, classes], and calls ``hook`` at every site.

        Inputs of several tensors are ``Arguments``; those of Esper's own hosts are one tensor.

        At ``vacant`` sites ``hook`` returns its input, so the call may be omitted, to fuse the layers around the site.
        """

    @abstractmethod
    def forward_from(self, x: Inputs, site: int, h: Tensor, hook: SiteHook, vacant: Collection[int] = ()) -> Tensor:
        """Runs the network after ``site`` on features ``h``, which were computed from the inputs ``x``.

        It calls ``hook`` at the later sites, as :meth:`forward_with_hook` does. No gradient flows to the layers before
        ``site``.
        """

    def probe(self, x: Inputs) -> None:
        """Finds the order and width of the sites in a forward pass of inputs ``x``, if they are not known yet.

        Raises ConfigError for sites that cannot hold a slot.
        """

    def forward(self, *x: Any, **named: Any) -> Tensor:
        """Maps inputs [B, ...], or several by position or by name, to logits, without seeds."""
        return self.forward_with_hook(gathered(x, named), lambda _site, h: h)

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Disables gradients: inference mode, or ``no_grad`` for hosts whose layers may cache tensors for training."""
        with torch.no_grad() if self.in_place else torch.inference_mode():
            yield

    def protected(self, h: Tensor) -> Tensor:
        """Returns features that later layers cannot overwrite: a copy of ``h`` if they work ``in_place``."""
        return h.clone() if self.in_place else h

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names in row-major order (r0c0, r0c1, ..., r1c0, ...): the order of actions and observations."""
        return row_major(site.name for site in self.sites)


@contextmanager
def kept_modes(*networks: nn.Module) -> Iterator[None]:
    """Restores the mode of every module of ``networks`` after a block.

    Modes are set by ``train`` first: layers that have one of their own may do more than to set a flag.
    """
    modes = [[(module, module.training) for module in network.modules()] for network in networks]
    try:
        yield
    finally:
        for (network, training), *others in modes:
            network.train(training)
            for module, mode in others:
                module.training = mode


def run_segment(segment: nn.Module, h: Tensor) -> Tensor:
    """Runs a segment. It is a function so that it can be compiled once for all segments of all hosts."""
    return segment(h)  # type: ignore[no-any-return]


class SegmentedHost(Host):
    """Segments s_0 ... s_S with site i between s_i and s_{i+1}; without seeds it is s_S(...s_1(s_0(x))).

    :meth:`forward_from` does not rerun anything before the site.
    """

    compiled: Run | None = None
    """Runs segments in place of ``run_segment``; copies and saved files of the host do not include it."""

    def __init__(self, segments: Sequence[nn.Module], sites: Sequence[SlotSite], topology: str) -> None:
        super().__init__()
        if len(segments) != len(sites) + 1:
            raise ValueError(f"{len(sites)} sites need {len(sites) + 1} segments, not {len(segments)}")
        row_major(site.name for site in sites)  # checks that the names are valid and distinct
        self.segments = nn.ModuleList(segments)
        self.sites = tuple(sites)
        self.topology = topology

    def forward_with_hook(self, x: Inputs, hook: SiteHook, vacant: Collection[int] = ()) -> Tensor:
        return self._from(0, cast(Tensor, x), hook, vacant)

    def forward_from(self, x: Inputs, site: int, h: Tensor, hook: SiteHook, vacant: Collection[int] = ()) -> Tensor:
        return self._from(site + 1, h, hook, vacant)

    def run(self, segment: nn.Module, h: Tensor) -> Tensor:
        """Runs ``segment`` on features ``h``, compiled if there is a compiled function."""
        return (self.compiled or run_segment)(segment, h)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name != "compiled"}

    def _from(self, start: int, h: Tensor, hook: SiteHook, vacant: Collection[int]) -> Tensor:
        for site in range(start, len(self.sites)):
            h = hook(site, self.run(self.segments[site], h))
        return self.run(self.segments[-1], h)


def row_major(names: Iterable[str]) -> tuple[str, ...]:
    """Sorts slot names by row, then column. Raises ValueError for a duplicate or a name not of the form ``r1c10``."""

    def place(name: str) -> tuple[int, int]:
        match = re.fullmatch(r"r(\d+)c(\d+)", name)
        if match is None:
            raise ValueError(f"slot name {name!r} is not of the form r0c0: row and column")
        return int(match[1]), int(match[2])

    ordered = tuple(sorted(names, key=place))
    if twice := sorted({name for name in ordered if ordered.count(name) > 1}):
        raise ValueError(f"two sites have the slot name {', '.join(twice)}")
    return ordered
