"""The host interface: a network with sites that features pass in a fixed order."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.chosen import choose_slots
from esper.core.place import Features, Place
from esper.hosts.inputs import Inputs, gathered

Run = Callable[[nn.Module, Tensor], Tensor]
"""Runs a segment on its input features and returns its output."""
SiteHook = Callable[[int, Features], Tensor]
"""Called at each site with its index in execution order and the pass; returns the features to continue with."""


class Host(nn.Module, ABC):
    """A network whose features can be changed at its sites, 0 ... S−1 in execution order."""

    sites: tuple[Place, ...]
    topology: str
    """Kind of blueprints that fit: ``cnn`` (features [B, C, H, W]), ``transformer`` and, if all positions are seen,
    ``encoder`` ([B, T, D]), ``mlp`` ([B, D])."""
    in_place = False
    """Whether layers may change a site's features in place afterwards, so that they must be copied to be kept."""

    @abstractmethod
    def forward_with_hook(
        self,
        x: Inputs,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        """Maps inputs x [B, ...] to logits, [B, classes] or [B, T, classes], and calls ``hook`` at every site.

        Inputs of several tensors are ``Arguments``; those of Esper's own hosts are one tensor.

        At ``vacant`` sites ``hook`` returns the features as they are, so the call may be omitted, to fuse the layers
        around the site; the sources of these sites are not kept.
        """

    @abstractmethod
    def forward_from(
        self,
        x: Inputs,
        site: int,
        at: Features,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        """Runs the network after ``site`` from a pass ``at`` that site, which was computed from the inputs ``x``.

        It calls ``hook`` at the later sites, as :meth:`forward_with_hook` does with the same ``vacant`` sites. A
        network that cannot be entered half-way runs from its start without gradients, with ``hook`` at the earlier
        sites too. No gradient flows to the layers before ``site``, unless through ``at``.
        """

    @property
    def possible_slots(self) -> tuple[str, ...]:
        """Names of all slots that :meth:`use_slots` may choose, in row-major order."""
        return self.slot_names

    def use_slots(self, names: Sequence[str]) -> None:
        """Keeps or adds the sites of these slots, and no others. Weights stay as they are.

        A name is that of a slot ("r2c0"), of a row ("r2"), of a column ("c0"), or "all". Raises ConfigError, listing
        the possible slots, for a name that stands for none of them, or without names.
        """
        wanted = choose_slots(names, self.possible_slots)
        if wanted != set(self.slot_names):
            self._use_slots(wanted)

    def _use_slots(self, names: set[str]) -> None:
        raise ConfigError(f"the slots of a {type(self).__name__} cannot be chosen")

    def lies_inside(self, slot: str, other: str) -> bool:
        """Returns whether the seed of ``slot`` adds to features between the source and the sink of ``other``."""
        return False

    def probe(self, x: Inputs) -> None:
        """Finds the order and width of the sites in a forward pass of inputs ``x``, if they are not known yet.

        Raises ConfigError for sites that cannot hold a slot.
        """

    def take_blocks(self, names: Collection[str]) -> bool:
        """Gives the network the blocks of which these are names of parameters; returns whether it has changed.

        Other names are ignored: loading their values fails.
        """
        return False

    def draw(self, layer: nn.Module) -> None:
        """Draws the weights of a new layer as those of its own are, where torch draws them differently."""

    def follow_layers(self, x: Inputs | None = None) -> None:
        """Gives the sites the widths that their layers have now; ``x`` are inputs."""
        if x is not None:
            self.probe(x)

    def forward(self, *x: Any, **named: Any) -> Tensor:
        """Maps inputs [B, ...], or several by position or by name, to logits, without seeds."""
        return self.forward_with_hook(gathered(x, named), lambda _site, at: at.h)

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Disables gradients: inference mode, or ``no_grad`` for hosts whose layers may cache tensors for training."""
        disabled = torch.no_grad() if self.in_place else torch.inference_mode()
        with disabled:
            yield

    def protected(self, h: Tensor) -> Tensor:
        """Returns features that later layers cannot overwrite: a copy of ``h`` if they work ``in_place``."""
        if self.in_place:
            return h.clone()
        return h

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
    modes: dict[nn.Module, bool] = {}
    for network in networks:
        modes.update((module, module.training) for module in network.modules())
    try:
        yield
    finally:
        for network in networks:
            network.train(modes[network])
        for module, training in modes.items():
            module.training = training


def layers_of(network: nn.Module) -> dict[str, nn.Module]:
    """Returns the submodules that have parameters of their own, in order, by name. The last one is the head."""
    return {
        name: module
        for name, module in network.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }


def features_at(
    host: Host,
    x: Inputs,
    sites: Collection[str] = (),
) -> dict[str, Features]:
    """Returns a pass of inputs ``x`` at these ``sites``, all if none is named, by name.

    It is made in eval mode, so that no buffer of the host changes.
    """
    features: dict[str, Features] = {}

    def keep(reached: int, at: Features) -> Tensor:
        name = host.sites[reached].name
        if not sites or name in sites:
            features[name] = at.each(host.protected)
        return at.h

    with kept_modes(host), host.without_gradients():
        host.eval()
        host.forward_with_hook(x, keep)
    return features


def run_segment(segment: nn.Module, h: Tensor) -> Tensor:
    """Runs a segment. It is a function so that it can be compiled once for all segments of all hosts."""
    return segment(h)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SiteSpan:
    """The joints of a :class:`SegmentedHost` between which a site lies."""

    source: int
    """Number of the joint whose features a seed reads."""
    sink: int
    """Number of the joint to whose features it adds."""

    def __post_init__(self) -> None:
        if not 0 <= self.source <= self.sink:
            raise ValueError(f"a span goes from an earlier joint to a later one, not from {self.source} to {self.sink}")


@dataclass(frozen=True)
class JointUse:
    """The sites that use a joint in a pass, before the segment that begins there."""

    sites: tuple[int, ...]
    """Sites whose seeds add here, in order; what they leave is what other seeds read here."""
    kept: tuple[int, ...]
    """Earlier joints that later sites read."""
    read: bool
    """Whether later sites read the features here."""

    @property
    def free(self) -> bool:
        """Whether nothing happens, so that the segments before and after may be fused."""
        return not self.sites and not self.read


@dataclass(frozen=True)
class Step:
    """The part of a :class:`SegmentedHost` between two joints."""

    module: nn.Module
    adds: int | None = None
    """Number of an earlier joint whose features are added to the module's output, as a skip connection does."""


class SegmentedHost(Host):
    """Segments s_0, s_1, ... in a row, with sites between them; without seeds it is ...(s_1(s_0(x))).

    Joint n lies before segment n: joint 0 has the inputs, the last one the logits. :meth:`forward_from` does not rerun
    anything before the site.

    Args:
        segments: the segments.
        sites: the sites in execution order.
        topology: kind of blueprints that fit.
        spans: where each site reads and adds; None: site i reads and adds to the output of segment i, and the last
            segment has none.
    """

    compiled: Run | None = None
    """Runs steps in place of ``run_segment``; copies and saved files of the host do not include it."""

    def __init__(
        self,
        segments: Sequence[nn.Module],
        sites: Sequence[Place],
        topology: str,
        spans: Sequence[SiteSpan] | None = None,
    ) -> None:
        super().__init__()
        if spans is None:
            if len(segments) != len(sites) + 1:
                raise ValueError(f"{len(sites)} sites need {len(sites) + 1} segments, not {len(segments)}")
            spans = [SiteSpan(joint, joint) for joint in range(1, len(segments))]
        self.segments = nn.ModuleList(segments)
        self.topology = topology
        self._lay_out(list(map(Step, segments)), sites, spans)
        self._all = tuple(zip(self.sites, self.spans, strict=True))

    @property
    def possible_slots(self) -> tuple[str, ...]:
        return row_major(site.name for site, _ in self._all)

    def _use_slots(self, names: set[str]) -> None:
        sites = []
        spans = []
        for site, span in self._all:
            if site.name in names:
                sites.append(site)
                spans.append(span)
        self._lay_out(list(map(Step, self.segments)), sites, spans)

    def lies_inside(self, slot: str, other: str) -> bool:
        spans = dict(zip((site.name for site in self.sites), self.spans, strict=True))
        outer = spans[other]
        return outer.source < spans[slot].sink < outer.sink

    def follow_layers(self, x: Inputs | None = None) -> None:
        """Also takes up segments of which a submodule has been replaced."""
        self._use_slots(set(self.slot_names))

    def _lay_out(
        self,
        steps: Sequence[Step],
        sites: Sequence[Place],
        spans: Sequence[SiteSpan],
    ) -> None:
        """Makes the host run by ``steps``, with these sites between them."""
        sinks = [span.sink for span in spans]
        in_range = all(1 <= sink <= len(steps) for sink in sinks)
        if len(spans) != len(sites) or sinks != sorted(sinks) or not in_range:
            raise ValueError(f"{len(sites)} sites need sinks from 1 to {len(steps)} in order, not {sinks}")
        row_major(site.name for site in sites)  # checks that the names are valid and distinct
        self.steps = tuple(steps)
        self.sites = tuple(sites)
        self.spans = tuple(spans)
        self._routes: dict[frozenset[int], list[JointUse]] = {}

    def forward_with_hook(
        self,
        x: Inputs,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        return self._from(0, -1, cast(Tensor, x), {}, hook, vacant)

    def forward_from(
        self,
        x: Inputs,
        site: int,
        at: Features,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        return self._from(self.spans[site].sink, site, at.h, dict(at.earlier), hook, vacant)

    def run(self, module: nn.Module, h: Tensor) -> Tensor:
        """Runs the ``module`` of a step on features ``h``, compiled if there is a compiled function."""
        run = self.compiled or run_segment
        return run(module, h)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name != "compiled"}

    def _from(
        self,
        joint: int,
        last: int,
        h: Tensor,
        earlier: dict[int, Tensor],
        hook: SiteHook,
        vacant: Collection[int],
    ) -> Tensor:
        """Goes on from features ``h`` at ``joint``, where the sites up to number ``last`` have acted."""
        route = self._route(frozenset(vacant))
        fused = False  # whether the step before was fused with the one that begins here
        while True:
            use = route[joint]
            for site in use.sites:
                if site <= last:
                    continue
                source = h
                read = self.spans[site].source
                if read != joint:
                    source = earlier[read]
                h = hook(site, Features(h, source, earlier))
            if joint == len(self.steps):
                return h
            if earlier or use.read:  # kept only for as long as somebody reads them
                earlier = {number: earlier[number] for number in use.kept}
                if use.read:
                    earlier[joint] = self.protected(h)
            h, fused = self._step(joint, h, fused, route[joint + 1].free)
            added = self.steps[joint].adds
            if added is not None:
                h = earlier[added] + h
            joint += 1

    def _route(self, vacant: frozenset[int]) -> list[JointUse]:
        """Returns what happens at each joint if the sites ``vacant`` are passed by."""
        route = self._routes.get(vacant)
        if route is None:
            acting = [site for site in range(len(self.sites)) if site not in vacant]
            route = [self._use(joint, acting) for joint in range(len(self.steps) + 1)]
            self._routes[vacant] = route
        return route

    def _use(self, joint: int, acting: Sequence[int]) -> JointUse:
        sites = []
        sources = set()
        for site in acting:
            span = self.spans[site]
            if span.sink == joint:
                sites.append(site)
            elif span.sink > joint:
                sources.add(span.source)
        for step in self.steps[joint:]:
            if step.adds is not None:
                sources.add(step.adds)
        kept = sorted(source for source in sources if source < joint)
        return JointUse(tuple(sites), tuple(kept), joint in sources)

    def _step(
        self,
        number: int,
        h: Tensor,
        fused: bool,
        free: bool,
    ) -> tuple[Tensor, bool]:
        """Runs the module of a step; returns its output and whether it was fused with the next one.

        ``fused``: whether the step before was fused with it; ``free``: whether nothing reads or adds to its output.
        """
        return self.run(self.steps[number].module, h), False


def row_major(names: Iterable[str]) -> tuple[str, ...]:
    """Sorts slot names by row, then column. Raises ValueError for a duplicate or a name not of the form ``r1c10``."""

    def place(name: str) -> tuple[int, int]:
        match = re.fullmatch(r"r(\d+)c(\d+)", name)
        if match is None:
            raise ValueError(f"slot name {name!r} is not of the form r0c0: row and column")
        return int(match[1]), int(match[2])

    ordered = tuple(sorted(names, key=place))
    twice = {name for name in ordered if ordered.count(name) > 1}
    if twice:
        raise ValueError(f"two sites have the slot name {', '.join(sorted(twice))}")
    return ordered
