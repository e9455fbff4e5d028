"""Programs of a host with its seeds: the passes of a training step, and those of a validation, as tapes.

They do what ``esper.training.step`` and ``esper.training.validate`` do, which are the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import Tensor, nn

from esper.core.site import Role, Site
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import GraftedHost
from esper.hosts.grown import GrownHost
from esper.hosts.host import Host, SegmentedHost, SiteSpan, Step
from esper.hosts.sources import SitePath
from esper.ops.tape import Shape, Tape, Unsupported, require_plain
from esper.ops.tape_parts import Parts
from esper.training import native_layers  # noqa: F401  registers Esper's layers
from esper.training.host_training import HostTraining
from esper.training.shadow import copied_buffers
from esper.training.step import ALPHA, TARGET

Configuration = tuple[float, ...]


@dataclass(frozen=True)
class Arrival:
    """A pass at a site: numbers of values."""

    joint: int
    h: int
    """Features to which the seed adds."""
    source: int
    """Features that the seed reads."""
    earlier: Mapping[int, int]
    """Features at earlier joints."""


AtSite = Callable[[int, Arrival], int]
"""Writes what happens at a site; returns the value to go on with."""


@dataclass(frozen=True)
class Route:
    """The layers of a host between the joints at which its sites lie."""

    steps: tuple[Step, ...]
    spans: tuple[SiteSpan, ...]
    """Where each site reads and adds."""
    grown: tuple[Mapping[int, tuple[nn.Module, float]], ...] = ()
    """Seeds that are built in, with their alphas, by the number of their site; those of the inner host first."""
    parts: Parts = field(default_factory=Parts)
    """Parts of tapes of the layers, and of the seeds at the sites."""

    def write(
        self,
        tape: Tape,
        at_site: AtSite,
        arrival: Arrival,
        last: int = -1,
    ) -> int:
        """Writes the host from a joint to its end; returns the value of the logits.

        Args:
            tape: to write on.
            at_site: called at each site after number ``last``.
            arrival: the pass at the joint.
            last: number of the last site that has acted.
        """
        value = arrival.h
        earlier = dict(arrival.earlier)
        for joint in range(arrival.joint, len(self.steps) + 1):
            for site, span in enumerate(self.spans):
                if span.sink != joint or site <= last:
                    continue
                source = value
                if span.source != joint:
                    source = earlier[span.source]
                value, source = self._with_grown(tape, site, value, source)
                value = at_site(site, Arrival(joint, value, source, dict(earlier)))
            if joint == len(self.steps):
                break
            earlier[joint] = value
            step = self.steps[joint]
            value = self.parts.write(tape, step.module, value)
            if step.adds is not None:
                value = tape.plus(earlier[step.adds], value)
        return value

    def _with_grown(
        self,
        tape: Tape,
        site: int,
        h: int,
        source: int,
    ) -> tuple[int, int]:
        """Writes the seeds that are built in at a site; returns the features there, and those that a seed reads."""
        for seeds in self.grown:
            if site not in seeds:
                continue
            seed, alpha = seeds[site]
            reads_sink = source == h
            h = tape.plus(h, self.parts.write(tape, seed, source), alpha)
            if reads_sink:
                source = h
        return h, source


def route_of(host: Host) -> Route:
    """Returns the route of a host. Raises Unsupported, naming what has no compiled form."""
    if isinstance(host, SegmentedHost) and _runs_its_steps(type(host)):
        return Route(host.steps, host.spans)
    if type(host) is GraftedHost:
        return _route_of_graft(host)
    if type(host) is GrownHost:
        return _route_of_grown(host)
    raise Unsupported(f"a {type(host).__name__} has no compiled form")


def _runs_its_steps(kind: type[SegmentedHost]) -> bool:
    """Whether hosts of a class do nothing but run their steps."""
    for name in ("__call__", "forward", "forward_with_hook", "_from", "run"):
        if getattr(kind, name) is not getattr(SegmentedHost, name):
            return False
    # A fused pool gives the same numbers.
    return kind._step in (SegmentedHost._step, CNNHost._step)


def _route_of_grown(host: GrownHost) -> Route:
    route = route_of(host.host)
    seeds = {}
    for number, site in enumerate(host.sites):
        if site.name in host.kept:
            seeds[number] = host.seeds[site.name], host.kept[site.name].alpha
    return replace(route, grown=(*route.grown, seeds))


def _route_of_graft(host: GraftedHost) -> Route:
    """Cuts a network of layers in a row wherever a site reads or adds."""
    leaves: list[nn.Module] = []
    begins: dict[str, int] = {}  # by path, the number of the first leaf
    ends: dict[str, int] = {}

    def walk(module: nn.Module, path: str) -> None:
        begins[path] = len(leaves)
        if type(module) is nn.Sequential:
            require_plain(module)
            for name, child in module._modules.items():  # named_children leaves out a layer that comes twice
                if child is not None:
                    walk(child, f"{path}.{name}" if path else name)
        else:
            leaves.append(module)
        ends[path] = len(leaves)

    walk(host.model, "")
    spans = []
    for place in host.sites:
        path = SitePath.parse(host.paths[place.name])
        source = ends.get(path.sink) if path.source is None else begins.get(path.source)
        sink = ends.get(path.sink)
        if source is None or sink is None:
            raise Unsupported(f"the {type(host.model).__name__} around {place.name} has no compiled form")
        spans.append((source, sink))

    cuts = sorted({0, len(leaves), *[leaf for span in spans for leaf in span]})
    steps = []
    for first, last in pairwise(cuts):
        steps.append(Step(nn.Sequential(*leaves[first:last])))
    return Route(
        tuple(steps),
        tuple(SiteSpan(cuts.index(source), cuts.index(sink)) for source, sink in spans),
    )


def write_delta(
    tape: Tape,
    parts: Parts,
    site: Site,
    source: int,
    track_finite: bool,
) -> int:
    """Writes the change that the seed of ``site`` makes, cut as ``esper.training.delta.delta_of`` cuts it."""
    seed = site.planted
    if seed is None:
        raise ValueError(f"{site.name} has no seed")
    if site.fossil:
        return parts.write(tape, seed.module, source)
    guarded = tape.guard(source, seed.finite, of_gradients=True, marks=track_finite)
    delta = parts.write(tape, seed.module, guarded)
    return tape.guard(delta, seed.finite, of_gradients=False, marks=track_finite)


def training_tape(
    training: HostTraining,
    shape: Shape,
    route: Route,
    length: int = 1,
) -> Tape:
    """Writes a step: the host's pass, then the shadow pass of each incubating seed.

    ``shape`` is that of a sample, and ``length`` as in ``Tape``. Each pass is a section, whose output are the logits of
    its loss. Raises Unsupported.
    """
    tape = Tape(shape, length)
    waiting: dict[int, Arrival] = {}

    def blending(shadow: bool) -> AtSite:
        def at_site(number: int, at: Arrival) -> int:
            site = training.sites[number]
            if site.on:
                delta = write_delta(tape, route.parts, site, at.source, track_finite=not shadow)
                return tape.plus(at.h, delta, alpha_of(training, ALPHA, number))
            if shadow or not site.incubating:
                return at.h
            if training.config.env.incubation == "ste":
                delta = write_delta(tape, route.parts, site, tape.detach(at.source), track_finite=True)
                return tape.pass_through(at.h, delta)
            waiting[number] = at
            return at.h

        return at_site

    end_section(tape, route.write(tape, blending(shadow=False), Arrival(0, 0, 0, {})))
    for number, at in waiting.items():
        site = training.sites[number]
        others = [seed for seed in training.seeds() if seed is not site.seed]
        tape.learning = {id(parameter) for parameter in training.seed_groups[site.name].parameters}
        with training.shadow_of(site).in_place(), copied_buffers(others):
            detached = _detached(tape, at)
            delta = write_delta(tape, route.parts, site, detached.source, track_finite=True)
            grown = tape.plus(detached.h, delta, alpha_of(training, TARGET, number))
            after = Arrival(at.joint, grown, grown, detached.earlier)
            end_section(tape, route.write(tape, blending(shadow=True), after, last=number))
    return tape


def alpha_of(training: HostTraining, row: int, site: int) -> tuple[Tensor, int]:
    """Returns the number that a pass reads for the alpha of a site, see ``Tape.plus``."""
    return training.alphas, row * len(training.sites) + site


def _detached(tape: Tape, at: Arrival) -> Arrival:
    """Writes the values of a pass without gradients."""
    values = {value: tape.detach(value) for value in {at.h, at.source, *at.earlier.values()}}
    earlier = {joint: values[value] for joint, value in at.earlier.items()}
    return Arrival(at.joint, values[at.h], values[at.source], earlier)


def end_section(tape: Tape, output: int) -> None:
    """Ends a section whose logits are the value ``output``. Raises Unsupported for outputs other than [B, classes]."""
    _check_output(tape, output)
    if output != len(tape.code):  # the output is the last value
        tape.plus(output, output, 0.0)
    tape.end_section()


def _check_output(tape: Tape, output: int) -> None:
    if tape.shapes[output][1:] != (1, 1):
        raise Unsupported("a host whose outputs are not [B, classes] has no compiled form")


@dataclass
class _Branch:
    """A pass of validation from where some configurations leave the others, as ``esper.training.validate`` has them."""

    members: list[int]
    last: int
    arrival: Arrival
    track_finite: bool
    tried: set[Site] = field(default_factory=set)


def validation_tape(
    training: HostTraining,
    shape: Shape,
    route: Route,
    configurations: list[Configuration],
    length: int = 1,
) -> tuple[Tape, list[int]]:
    """Writes the passes of all configurations; returns the values of their logits, too. Raises Unsupported."""
    tape = Tape(shape, length)
    tape.learning = ()
    tape.evaluates = True
    outputs: dict[int, int] = {}
    waiting = [_Branch(list(range(len(configurations))), -1, Arrival(0, 0, 0, {}), True)]
    while waiting:
        branch = waiting.pop()
        branches: list[_Branch] = []
        with ExitStack() as trial:

            def begin_trial(site: Site, branch: _Branch = branch, trial: ExitStack = trial) -> None:
                if not site.incubating or site in branch.tried:
                    return
                branch.tried.add(site)
                branch.track_finite = False
                if training.config.env.incubation == "shadow":
                    trial.enter_context(training.shadow_of(site).in_place())

            def at_site(
                number: int,
                at: Arrival,
                branch: _Branch = branch,
                branches: list[_Branch] = branches,
                begin_trial: Callable[[Site], None] = begin_trial,
            ) -> int:
                site = training.sites[number]
                by_alpha: dict[float, list[int]] = {}
                for member in branch.members:
                    by_alpha.setdefault(configurations[member][number], []).append(member)
                delta = None
                if site.seed is not None and any(by_alpha):
                    delta = write_delta(tape, route.parts, site, at.source, branch.track_finite)

                def leaving(alpha: float, member: int) -> int:
                    if delta is None or not alpha:
                        return at.h
                    factor = (training.tried, member * len(training.sites) + number)
                    return tape.plus(at.h, delta, factor)

                first, *others = by_alpha.items()
                for alpha, members in others:
                    value = leaving(alpha, members[0])
                    after = Arrival(at.joint, value, value, at.earlier)
                    branches.append(_Branch(members, number, after, branch.track_finite))
                alpha, branch.members = first
                if delta is not None and alpha:
                    begin_trial(site)
                return leaving(alpha, branch.members[0])

            # Seeds up to there have acted in the pass that this one has left.
            alphas = configurations[branch.members[0]]
            for site, alpha in zip(training.sites[: branch.last + 1], alphas, strict=False):
                if alpha:
                    begin_trial(site)
            value = route.write(tape, at_site, branch.arrival, branch.last)
        _check_output(tape, value)
        for member in branch.members:
            outputs[member] = value
        waiting.extend(reversed(branches))
    return tape, [outputs[member] for member in range(len(configurations))]


def training_roles(training: HostTraining) -> Iterator[Hashable]:
    """Yields what the program of a step depends on: what each site does, with which seed, and whether that learns."""
    for site in training.sites:
        yield site.role
        if site.role is not Role.ABSENT:
            yield site.learning
            yield site.seed


def validation_roles(training: HostTraining) -> Iterator[Hashable]:
    """Yields what the program of a validation depends on, besides its configurations."""
    for site in training.sites:
        yield site.role
        yield site.seed
