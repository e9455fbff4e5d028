"""What a host is to the rest of Esper: a network with sites, between which features flow in a fixed order."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.seeds.slot import SlotSite

Run = Callable[[nn.Module, Tensor], Tensor]
"""Carries out a segment on the features that arrive at it."""
At = Callable[[int, Tensor], Tensor]
"""Called at each site with its number in execution order and the features that arrive; returns those that go on."""


class Host(nn.Module, ABC):
    """A network whose features can be changed at its sites, 0 ... S−1 in execution order."""

    sites: tuple[SlotSite, ...]
    topology: str
    """Blueprints that fit: ``cnn`` (features [B, C, H, W]), ``transformer`` ([B, T, D]), ``mlp`` ([B, D])."""
    overwrites = False
    """Whether layers may change in place the features that a site has passed on, so that who keeps them copies them."""

    @abstractmethod
    def walk(self, x: Tensor, at: At, vacant: Collection[int] = ()) -> Tensor:
        """Inputs x [B, ...] to logits, [B, classes] or [B, T, classes], with ``at`` called at every site. It need not
        be called at ``vacant`` ones, where it would pass features on: what lies around those may be done as one."""

    @abstractmethod
    def resume(self, x: Tensor, site: int, h: Tensor, at: At, vacant: Collection[int] = ()) -> Tensor:
        """The rest of the network from ``site`` on, as if features ``h`` had left it; ``x`` are the inputs they came
        from. ``at`` is called at the later sites, as in :meth:`walk`; no gradient flows to what comes before."""

    def probe(self, x: Tensor) -> None:
        """Learn from a forward pass of inputs ``x`` what is not known yet: order and width of the sites.

        Raises ConfigError for sites that cannot hold a slot.
        """

    def forward(self, x: Tensor) -> Tensor:
        """The host left alone: inputs [B, ...] to logits."""
        return self.walk(x, _pass_on)

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """In inference mode; without gradients only, where layers may keep what they see for a training pass."""
        with torch.no_grad() if self.overwrites else torch.inference_mode():
            yield

    def kept(self, h: Tensor) -> Tensor:
        """Features that stay as they are while the network goes on."""
        return h.clone() if self.overwrites else h

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names in row-major order (r0c0, r0c1, ..., r1c0, ...): the order of actions and observations."""
        return row_major(site.name for site in self.sites)


def run_segment(segment: nn.Module, h: Tensor) -> Tensor:
    """A function and no method, because it is what is compiled, once for all segments of all hosts."""
    return segment(h)  # type: ignore[no-any-return]


class SegmentedHost(Host):
    """Segments s_0 ... s_S with site i between s_i and s_{i+1}: alone it is s_S(...s_1(s_0(x))).

    Nothing before a site runs again when the network is resumed there.
    """

    compiled: Run | None = None
    """Carries out segments in place of ``run_segment``; no copy and no file of the host has it."""

    def __init__(self, segments: Sequence[nn.Module], sites: Sequence[SlotSite], topology: str) -> None:
        super().__init__()
        if len(segments) != len(sites) + 1:
            raise ValueError(f"{len(sites)} sites need {len(sites) + 1} segments, not {len(segments)}")
        row_major(site.name for site in sites)  # that they can be told apart
        self.segments = nn.ModuleList(segments)
        self.sites = tuple(sites)
        self.topology = topology

    def walk(self, x: Tensor, at: At, vacant: Collection[int] = ()) -> Tensor:
        return self._from(0, x, at, vacant)

    def resume(self, x: Tensor, site: int, h: Tensor, at: At, vacant: Collection[int] = ()) -> Tensor:
        return self._from(site + 1, h, at, vacant)

    def run(self, segment: nn.Module, h: Tensor) -> Tensor:
        """What leaves ``segment`` for features ``h`` that arrive at it."""
        return (self.compiled or run_segment)(segment, h)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name != "compiled"}

    def _from(self, start: int, h: Tensor, at: At, vacant: Collection[int]) -> Tensor:
        for site in range(start, len(self.sites)):
            h = at(site, self.run(self.segments[site], h))
        return self.run(self.segments[-1], h)


def _pass_on(_site: int, h: Tensor) -> Tensor:
    return h


def row_major(names: Iterable[str]) -> tuple[str, ...]:
    """Slot names by row, then column. Raises ValueError for a name that is not of the form ``r1c10`` or comes twice."""
    ordered = tuple(sorted(names, key=_row_and_column))
    if twice := sorted({name for name in ordered if ordered.count(name) > 1}):
        raise ValueError(f"two sites have the slot name {', '.join(twice)}")
    return ordered


def _row_and_column(name: str) -> tuple[int, int]:
    """``r1c10`` → (1, 10). Raises ValueError for any other form."""
    match = re.fullmatch(r"r(\d+)c(\d+)", name)
    if match is None:
        raise ValueError(f"slot name {name!r} is not of the form r0c0: row and column")
    return int(match[1]), int(match[2])
