"""The places of a model where seeds can grow, found in a pass."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.blueprints import BLUEPRINTS, Blueprint, BlueprintRegistry, source
from esper.core.blueprints.adapted import is_plain_matrix
from esper.core.blueprints.elementwise import is_elementwise
from esper.core.place import Place, words_of
from esper.core.ramps import BlendOperator
from esper.core.site import seed_of
from esper.hosts.between import Between, ModuleRun, Trace, layers_of, place_of
from esper.hosts.container import own_children
from esper.hosts.example import as_before, coarsest_dtype, counting, difference, outputs_of, samples_in, tensors_in
from esper.hosts.gated import gated_of
from esper.hosts.layout import Layout, check_module
from esper.hosts.seed_hook import attach, detach
from esper.hosts.sources import SitePath
from esper.hosts.widen import SourceSeed, merge_together
from esper.telemetry import html

if TYPE_CHECKING:
    from esper.hosts.need import Loss

Kind = Literal["residual", "widen", "lora"]

NEXT_LAYERS = 3
"""Number of layers behind a layer among which the one that reads its units is looked for."""

MOST = 8
"""Max sites of ``sites="auto"``."""

Sites = Mapping[str, str] | Sequence[str]
"""Where slots lie: by their names, in order, or ``"auto"``."""

AUTO = "auto"

ITEMS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""Containers whose items are blocks."""


@dataclass(frozen=True)
class SeedPrice:
    """The price of a seed."""

    parameters: int
    flops: float
    """Floating-point operations of a forward pass, a sample."""
    units: int | None = None
    """Of a widening, the number of units that the layer has with it."""


@dataclass(frozen=True)
class FoundSite:
    """A place of a model where seeds can grow."""

    path: str
    """The text for ``sites=``."""
    kind: Kind
    """``residual``: seeds work on what a block returns; ``widen``: more units inside a layer; ``lora``: a change of a
    layer's weights."""
    topology: str
    """Kind of blueprints that fit."""
    layout: str
    """Names of the dimensions of the features that seeds add to, such as ``[N, C, H, W]``."""
    width: int
    """Number of channels of these features; of a widening, number of units that the layer has."""
    shape: tuple[int, ...]
    """Shape of these features in the pass."""
    merges: bool
    """Whether kept seeds become a part of the model's layers."""
    runs: int = 1
    """Number of runs of the block in a pass; a seed runs as often. ``graft`` takes only blocks that run once."""
    blueprints: dict[str, SeedPrice] = field(default_factory=dict)
    """The seeds that fit, by blueprint."""
    need: float | None = None
    """Need of the layer there, in units of the loss; None if it is not measured."""

    def __repr__(self) -> str:
        return f"FoundSite({self.path}: {self.kind}, {self.width} wide, {', '.join(self.blueprints)})"

    def plain(self) -> dict[str, Any]:
        """Returns the same as JSON."""
        return asdict(self)


class FoundSites(list[FoundSite]):
    """The sites of a model; as a text and in a notebook, a table."""

    def __repr__(self) -> str:
        return f"FoundSites({', '.join(site.path for site in self)})"

    def __str__(self) -> str:
        return "\n".join(table_of(self))

    def _repr_html_(self) -> str:
        heads, *rows = rows_of(self)
        return html.table(heads, rows)


def find_sites(
    model: nn.Module,
    example: Any,
    blueprints: BlueprintRegistry | None = None,
    need: tuple[Loss, Loss] | None = None,
) -> FoundSites:
    """Finds where seeds can grow in ``model``, in the order of a forward pass, or with ``need``, where it is largest.

    Listed are the outputs of blocks, pairs of layers whose units can be more, and projections of attention whose
    weights can be changed by a LoRA. A widening is listed only if a trial of it merges: the wider layers compute what
    the seed did beside them.

    Args:
        model: any network; it stays as it is.
        example: a few inputs of it: one argument, a tuple of its arguments, or a dict of them by name. Samples come
            first in each.
        blueprints: what seeds can be; None: the built-in registry.
        need: two functions that compute the mean loss of a batch each, with the model in the mode that it has, as for
            ``Grower.measure_need``. Sites of widenings, and of LoRAs of frozen layers, then have a need and come first,
            those with the largest need before the others.

    Raises:
        ConfigError: the model cannot run on ``example``, or a loss does not depend on it.
    """
    return FoundSites(_found(model, example, BLUEPRINTS.copy_of(blueprints), need)[0])


def _found(
    model: nn.Module,
    example: Any,
    registry: BlueprintRegistry,
    need: tuple[Loss, Loss] | None = None,
) -> tuple[list[FoundSite], list[str]]:
    """Returns the sites of :func:`find_sites`, and the paths of the submodules in the order in which they end."""
    trace = Trace(model, partial(outputs_of, model, example))
    samples = samples_of(example)
    layouts = {}
    for path in trace.runs:
        try:
            layouts[path] = trace.layout(path, SitePath(path), samples)
        except ConfigError:  # such as scores of attention, [N, heads, T, T, ...]
            continue
    inside = _inside(trace, layouts)
    blocks = {path: SitePath(path) for path in _blocks(trace, layouts)}
    layouts |= trace.layouts(blocks, None, samples)
    places = {}
    for text in (*blocks, *inside):
        sink = SitePath.parse(text).sink
        width = trace.width(sink, layouts[sink])
        places[text] = place_of(model, text, width, layouts[sink], inside.get(text))
    fitting = {text: places[text] for text in inside if registry.fitting("", places[text])}
    merging = trial_merges(model, example, fitting, inside, registry)
    sites = []
    for text in (*blocks, *merging):
        site = _describe(text, places[text], trace.runs, samples, registry)
        if site is not None:
            sites.append(site)
    order = list(trace.runs)
    sites.sort(key=lambda site: order.index(SitePath.parse(site.path).sink))
    if need is not None:
        from esper.hosts.need import needs_at  # few measure it

        with as_before(model):
            needs = needs_at({site.path: places[site.path] for site in sites}, *need)
        sites = [replace(site, need=needs.get(site.path)) for site in sites]
        sites.sort(key=lambda site: -math.inf if site.need is None else site.need, reverse=True)
    return sites, order


def named_sites(
    model: nn.Module,
    sites: Sites,
    example: Any = None,
    most_runs: int | None = None,
) -> dict[str, str]:
    """Returns sites with the names of their slots: those of row 0 read their sink, those of row 2 have a source.

    ``"auto"`` leaves out blocks that run more often than ``most_runs`` in a pass. Raises ConfigError for another text
    than ``"auto"``, and for that without an example.
    """
    if isinstance(sites, Mapping):
        return dict(sites)
    if sites == AUTO:
        if example is None:
            raise ConfigError("sites='auto' needs example=: inputs of the model, to find its sites in a pass")
        return chosen_sites(model, example, most_runs)
    if isinstance(sites, str):
        raise ConfigError(f"sites is {sites!r}; it must be 'auto', a list of submodules, or a dict of them by slot")
    return slots_of(sites)


def chosen_sites(model: nn.Module, example: Any, most_runs: int | None = None) -> dict[str, str]:
    """Returns the sites of ``sites="auto"`` by slot: those of widenings, and in each stage one for other seeds.

    A stage is a part of the model whose features have one shape. No other seed lies between the layers of a widening,
    which could not merge with it. Blocks that run more often than ``most_runs`` in a pass are left out. Raises
    ConfigError without a site.
    """
    sites, order = _found(model, example, BLUEPRINTS)
    if most_runs is not None:
        sites = [site for site in sites if site.runs <= most_runs]
    widenings = [site.path for site in sites if site.kind == "widen"]
    paths = _spread(widenings, MOST // 2)
    widened = list(map(SitePath.parse, paths))
    others = []
    for site in sites:
        if site.kind != "residual" or _is_within(site.path, widened, order):
            continue
        others.append(site)
    paths += _spread(_last_of_each_stage(others), MOST - len(paths))
    if not paths:
        raise ConfigError("sites='auto' finds no place in the model where a seed could grow; name submodules instead")
    return slots_of(paths)


def _last_of_each_stage(sites: Sequence[FoundSite]) -> list[str]:
    """Returns the path of the last of ``sites`` in each stage, in forward order of the stages."""
    last = {}
    for site in sites:
        stage = site.shape[1:], site.width
        last[stage] = site.path
    return list(last.values())


def _is_within(path: str, widened: Sequence[SitePath], order: Sequence[str]) -> bool:
    """Whether a submodule ends between the two layers of one of the ``widened`` pairs."""
    end = order.index(path)
    for pair in widened:
        first = order.index(pair.source or pair.sink)
        if first <= end < order.index(pair.sink):
            return True
    return False


def slots_of(paths: Sequence[str]) -> dict[str, str]:
    """Returns ``paths`` by names of slots, in their order."""
    counts = {0: 0, 2: 0}
    named = {}
    for text in paths:
        row = 2
        if SitePath.parse(text).source is None:
            row = 0
        named[f"r{row}c{counts[row]}"] = text
        counts[row] += 1
    return named


def _spread(paths: list[str], most: int) -> list[str]:
    """Returns at most this many of ``paths``, evenly spread, the last one among them."""
    if len(paths) <= most:
        return paths
    return [paths[(number + 1) * len(paths) // most - 1] for number in range(most)]


def samples_of(example: Any) -> int | None:
    """Returns the number of samples of the inputs ``example``, see :func:`samples_in`."""
    return samples_in(tensors_in(example))


def _blocks(trace: Trace, layouts: Mapping[str, Layout]) -> list[str]:
    """Returns the paths of the blocks whose outputs seeds can change."""
    # By the tensor that they return: of blocks that return the same one, the outermost ends last, and is kept.
    blocks: dict[int, str] = {}
    for path in layouts:
        run = trace.runs[path]
        final = any(run.output is result for result in trace.results)
        if path and not run.changes and not final and _is_block(trace.model, path):
            blocks[id(run.output)] = path
    return list(blocks.values())


def _is_block(model: nn.Module, path: str) -> bool:
    """Whether a submodule is a block with weights: an item of a list or of a Sequential, a part of the model
    itself, or a recurrent layer. In a list of single layers, the activations are its blocks."""
    module = model.get_submodule(path)
    try:
        check_module(model, path, path, None)
    except ConfigError:
        return False
    if isinstance(module, nn.RNNBase):
        return True
    outer, _, _ = path.rpartition(".")
    parent = model.get_submodule(outer)
    if own_children(module):
        has_weights = next(module.parameters(), None) is not None
        return has_weights and (isinstance(parent, ITEMS) or not outer)
    if not isinstance(parent, nn.Sequential):
        return False
    if any(own_children(sibling) for sibling in parent.children()):
        return False
    return is_elementwise(module)


def _inside(trace: Trace, layouts: Mapping[str, Layout]) -> dict[str, Between]:
    """Returns the layers of widenings, and of LoRAs of the projections of attention, by the text of the site."""
    linear = []
    projections = []
    gated = []
    for path, run in trace.runs.items():
        if run.count > 1:
            continue
        module = trace.model.get_submodule(path)
        if _is_linear(module):
            linear.append(path)
            if _of_attention(trace.model, path):
                projections.append(path)
        elif gated_of(module) is not None:
            gated.append(path)
    sites = []
    for number, first in enumerate(linear, 1):
        sites += [SitePath(sink, first) for sink in linear[number : number + NEXT_LAYERS]]
    sites += [SitePath(path, path) for path in (*projections, *gated)]
    inside: dict[str, Between] = {}
    widened: set[str] = set()
    for site in sites:
        between = trace.between(site)
        if between.obstacle or site.sink not in layouts:
            continue
        if site.source == site.sink:
            if site.sink not in widened:
                inside[str(site)] = between
        elif source.widening_obstacle(layers_of(trace.model, between.parts)) is None:
            widened.update(site.paths)
            inside[str(site)] = between
    return inside


def _is_linear(module: nn.Module) -> bool:
    """Whether a layer can be widened, or read the units of a widened layer."""
    return is_plain_matrix(module) or type(module) in source.CONVOLUTIONS


def _of_attention(model: nn.Module, path: str) -> bool:
    """Whether a layer is part of a module whose class name contains attention."""
    outer = path
    while outer:
        outer, _, _ = outer.rpartition(".")
        kind = type(model.get_submodule(outer))
        if re.search("attention|attn", kind.__name__, re.IGNORECASE):
            return True
    return False


def _describe(
    path: str,
    place: Place,
    runs: Mapping[str, ModuleRun],
    samples: int | None,
    registry: BlueprintRegistry,
) -> FoundSite | None:
    """Returns a place with the seeds that fit there and are offered by default; None if no seed fits."""
    recipes = registry.fitting("", place)
    fitting = {name: recipe for name, recipe in recipes.items() if not recipe.if_named}
    site = SitePath.parse(path)
    run = runs[site.sink]
    sink = run.output
    reads = sink
    if site.source is not None:
        reads = runs[site.source].inputs
    if not fitting or reads is None:
        return None
    assert isinstance(sink, Tensor)
    assert isinstance(reads, Tensor)
    kind = _kind_of(site, place)
    width = place.channels
    if kind == "widen":
        width = source.width_of(place.layers[0])
    layout = words_of(place.topology, place.order)
    if len(layout.split()) != sink.dim():
        layout = ""
    return FoundSite(
        path=path,
        kind=kind,
        topology=place.topology,
        layout=layout,
        width=width,
        shape=tuple(sink.shape),
        merges=kind != "residual",
        runs=run.count,
        blueprints={name: _price(recipe, place, reads, samples, run.count) for name, recipe in fitting.items()},
    )


def _kind_of(site: SitePath, place: Place) -> Kind:
    if site.source is None:
        return "residual"
    if site.source != site.sink or isinstance(place.layers[0], source.Extensible):
        return "widen"
    return "lora"


@torch.no_grad()
def _price(
    recipe: Blueprint,
    place: Place,
    reads: Tensor,
    samples: int | None,
    runs: int,
) -> SeedPrice:
    """Prices a seed of ``recipe`` that reads features like ``reads`` in each of ``runs`` runs."""
    with torch.random.fork_rng(devices=[]), counting() as counter:
        seed = seed_of(recipe, BlendOperator.ADD, place)
        seed.to(reads)
        seed.eval()
        seed(torch.zeros_like(reads[:1]))
    size = sum(p.numel() for p in seed.parameters())
    # The seed has run on one row; features may have several rows a sample, such as those of its positions.
    flops = runs * counter.get_total_flops() * len(reads) / (samples or len(reads))
    return SeedPrice(size, flops, source.units_with(recipe.name, place))


@torch.no_grad()
def trial_merges(
    model: nn.Module,
    example: Any,
    places: Mapping[str, Place],
    inside: Mapping[str, Between],
    registry: BlueprintRegistry,
) -> list[str]:
    """Returns the paths of those ``places`` whose seeds become a part of the layers of a copy of ``model``.

    ``inside`` has the layers at each. The trial has a seed with random weights at each place, always the same, and
    compares the outputs of the copy with those of its wider layers.
    """
    if not places:
        return []
    try:
        network = copy.deepcopy(model).eval()
    except Exception as error:
        raise ConfigError(f"the model cannot be copied: {type(error).__name__}: {error}") from error
    like = next(network.parameters())
    seeds = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for path, place in places.items():
            recipe = next(iter(registry.fitting("", place).values()))
            copied = place_of(network, path, place.channels, Layout(place.topology), inside[path])
            seed = seed_of(recipe, BlendOperator.ADD, copied)
            for parameter in seed.parameters():
                nn.init.normal_(parameter, std=0.05)
            hook = attach(network, {path: ("trial", seed.to(like.device, like.dtype), 1.0)})[0]
            source_seed = SourceSeed(
                name=path,
                place=copied,
                blueprint=recipe.name,
                body=seed.body,
                alpha=1.0,
                inside=(),
                remove=partial(detach, network, hook),
            )
            seeds.append(source_seed)
    run = partial(outputs_of, network, example)
    wanted = run()
    rounding = coarsest_dtype(network)
    staying = merge_together(network, seeds, lambda: difference(wanted, run(), rounding))
    return [path for path in places if path not in staying]


def rows_of(sites: Sequence[FoundSite]) -> list[tuple[str, ...]]:
    """Returns the cells of a table of ``sites``, its heads first."""
    rows: list[tuple[str, ...]] = [
        ("site", "kind", "adds to", "width", "blueprints: parameters, FLOPs a sample", "merges", "need")
    ]
    for site in sites:
        first, *others = [_words(site, name, price) for name, price in site.blueprints.items()]
        layout = site.layout or "x".join(map(str, site.shape[1:]))
        merges = "yes" if site.merges else "no"
        need = "" if site.need is None else f"{site.need:.3g}"
        rows.append((site.path, site.kind, layout, str(site.width), first, merges, need))
        rows += [("", "", "", "", other, "", "") for other in others]
    if all(site.need is None for site in sites):
        rows = [row[:-1] for row in rows]
    return rows


def _words(site: FoundSite, blueprint: str, price: SeedPrice) -> str:
    units = "" if price.units is None else f" {site.width:,} -> {price.units:,} units"
    return f"{blueprint}{units}: {price.parameters:,}, {price.flops:,.0f}"


def table_of(sites: Sequence[FoundSite]) -> list[str]:
    """Returns lines of a table of ``sites`` for people."""
    rows = rows_of(sites)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
