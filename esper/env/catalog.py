"""The blueprints that could be planted in a host: their sizes, costs and layers, for controllers and masks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.action import ActionSpec
from esper.core.blend import gate_parameters
from esper.core.blueprints import Blueprint, BlueprintRegistry
from esper.core.blueprints.source import SHARES, widening_obstacle, width_at
from esper.core.chosen import choose_blueprints
from esper.core.place import Features, Place
from esper.core.slots import Bools, Floats, Ints
from esper.core.state import Choices, never_shrinks
from esper.hosts.example import counting
from esper.hosts.host import Host, features_at, row_major
from esper.hosts.inputs import Inputs
from esper.ops.torch_state import training_state
from esper.training.rng import seeded


class BlueprintCatalog:
    """The seeds that could be planted in the hosts of one architecture: their sizes, costs and layers.

    Args:
        topology: that of the host; a place may have its own.
        places: the sites of the host.
        registry: the recipes by topology and name.
        spec: names of the slots, and of the blueprints that may be planted.
        widest: max units of a layer that widens; None: there is no limit but the budget.
    """

    def __init__(
        self,
        topology: str,
        places: Sequence[Place],
        registry: BlueprintRegistry,
        spec: ActionSpec,
        widest: int | None = None,
    ) -> None:
        self.widest = widest
        self.topology = topology
        self.places = places
        self.registry = registry
        self.spec = spec
        # A baseline's hosts have no blueprints, and the index of a blueprint is 0 then.
        count = max(len(spec.blueprints), 1)
        self.at_once: Bools = np.zeros(count, dtype=np.bool_)
        """Blueprints whose seeds may be a part of their host at once, at one of the places, [B]."""
        self.only_added: Bools = np.zeros(count, dtype=np.bool_)
        """Blueprints whose seeds are added to features whatever the blend style, [B]."""
        self._seeds = []
        """The seeds that could be planted in the layers as they are."""
        self._costs: dict[Hashable, tuple[float, int]] = {}
        """Operations of seeds, by slot, blueprint or family, layers and features: those of a body, and its size."""
        for s, b, recipe, place in self._offered():
            self.at_once[b] |= recipe.at_once
            self.only_added[b] |= recipe.only_added
            narrow = widest is None or width_at(place) * (1 + SHARES.get(recipe.name, 0)) <= widest
            if narrow and recipe.misfit(place) is None:
                self._seeds.append((s, b, recipe, place))

    @classmethod
    def select(
        cls,
        topology: str,
        places: Sequence[Place],
        registry: BlueprintRegistry,
        wanted: tuple[str, ...] | None,
        grows: bool = False,
    ) -> BlueprintCatalog:
        """Returns the catalog of the blueprints ``wanted``, or of all that fit at one of the places; if it ``grows``,
        also of those that fit once a place is wider.

        Raises ConfigError for an unknown blueprint, and for a place in which none fits, with the reasons.
        """
        for place in places:
            if place.has_source and not registry.fitting(topology, place):
                raise _nothing_fits(topology, place, registry)
        slots = row_major(place.name for place in places)
        kinds = dict.fromkeys(place.topology or topology for place in places)
        names = choose_blueprints(
            wanted,
            registry.names(topology, places, if_named=True, wider=grows),
            f"{', '.join(kinds)} hosts",
            partial(registry.misfit, topology, places),
            registry.names(topology, places, wider=grows),
        )

        by_slot = {place.name: registry.fitting(topology, place, wider=grows) for place in places}
        offers = []
        for slot in slots:
            fitting = tuple(name for name in names if name in by_slot[slot])
            offers.append(fitting)
        # Most hosts need no table.
        if all(len(fitting) == len(names) for fitting in offers):
            offers = []
        return cls(topology, places, registry, ActionSpec(slots, names, tuple(offers)))

    def choices(
        self,
        host: Host,
        sample: Inputs,
        at_once: bool,
    ) -> Choices:
        """Returns the sizes of ``host``, of which ``sample`` is a batch, and of its possible seeds.

        Raises ConfigError for a blueprint that cannot be built, or whose ``parameters`` raises.
        """
        return self._sizes(host, sample, self.kinds(at_once))

    def grown(self, host: Host, sample: Inputs, first: Choices) -> Choices:
        """Returns the same of a ``host`` whose layers have grown since they were those of ``first``.

        Only what was possible at first still is.
        """
        return self.at(host.sites)._sizes(host, sample, first.kinds)

    def at(self, places: Sequence[Place]) -> BlueprintCatalog:
        """Returns the catalog of the same seeds at ``places``, whose layers have grown."""
        catalog = BlueprintCatalog(self.topology, places, self.registry, self.spec, self.widest)
        catalog._costs = self._costs  # merges change the layers of few places
        return catalog

    def _sizes(
        self,
        host: Host,
        sample: Inputs,
        kinds: Floats,
    ) -> Choices:
        # One pass shows the operations of the host and the features at every place.
        with seeded(0), counting() as counter:
            features = features_at(host, sample)
        sizes = self.parameters()
        return Choices(
            host_parameters=host.parameter_count,
            host_flops=counter.get_total_flops() / len(sample),
            parameters=sizes,
            flops=self.flops(features, sizes),
            widths=self.widths(),
            kinds=kinds,
            **shrinkable_at(host, self.spec.slots),
        )

    def parameters(self) -> Ints:
        """Returns the number of parameters of each blueprint in each slot with its largest blend style, [S, B]; 0 where
        it does not fit.

        The gated style is the largest, so a blueprint that is affordable is so in any style. Raises ConfigError for a
        blueprint whose ``parameters`` raises.
        """
        sizes = np.zeros((len(self.spec.slots), len(self.spec.blueprints)), dtype=np.int64)
        for s, b, recipe, place in self._seeds:
            sizes[s, b] = _size(recipe, place)
        return sizes

    def widths(self) -> Ints:
        """Returns the number of units of the layer that grows in each slot, or of channels where none does, [S]."""
        by_name = {place.name: width_at(place) for place in self.places}
        return np.array([by_name[slot] for slot in self.spec.slots], dtype=np.int64)

    def flops(self, features: Mapping[str, Features], sizes: Ints) -> Floats:
        """Returns the operations of a forward pass of each blueprint's body in each slot, a sample, [S, B].

        ``features`` are those of a pass at each slot, ``sizes`` the numbers of parameters, [S, B].
        A body that cannot run there counts as 0: it cannot be planted.
        """
        flops = np.zeros((len(self.spec.slots), len(self.spec.blueprints)))
        for s, b, recipe, place in self._seeds:
            source = features[place.name].source
            shapes = []
            for layer in place.layers:
                shapes += [parameter.shape for parameter in layer.parameters()]
            key = (s, recipe.family or b, source.shape, *shapes)
            if key not in self._costs:  # of a family, one body is made and run
                self._costs[key] = (_flops(recipe, place, source), int(sizes[s, b]))
            of_body, size = self._costs[key]
            flops[s, b] = of_body * sizes[s, b] / size
        return flops

    @training_state()
    def kinds(self, at_once: bool = False) -> Floats:
        """Returns a description of each blueprint, [B, 6], see ``esper.core.observation.KINDS``.

        ``at_once`` says whether seeds that may be a part of their host at once are. The layers of a blueprint are those
        of a body for the widest place at which it fits, so a policy can recognise a blueprint it was not trained on.
        Raises ConfigError for a body that cannot be built.
        """
        rows = []
        by_name: dict[str, list[Place]] = {}
        for _, b, _, place in self._offered():
            by_name.setdefault(self.spec.blueprints[b], []).append(place)
        with seeded(0):  # bodies are built, and their weights are not used
            for name in self.spec.blueprints:
                place = max(by_name[name], key=lambda place: place.channels)
                recipe = self.registry.at(self.topology, place, name)
                with _named_errors(recipe, "be built", place):
                    shapes = [p.shape for p in recipe.body(place).parameters()]
                row = (
                    *_built_of(shapes),
                    recipe.reads_source,
                    recipe.zero_at_birth,
                    at_once and recipe.at_once,
                )
                rows.append(row)
        return np.array(rows, dtype=np.float64)

    def _offered(self) -> Iterator[tuple[int, int, Blueprint, Place]]:
        """Yields the seeds that may be planted, now or when their places are wider: the indices of slot and blueprint,
        the recipe, and the place."""
        for place in self.places:
            offered = self.spec.offers(place.name)
            for name, recipe in self.registry.fitting(self.topology, place, True, offered).items():
                s = self.spec.slots.index(place.name)
                b = self.spec.blueprints.index(name)
                yield s, b, recipe, place


def shrinkable_at(host: Host, slots: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of Choices about units that can be taken out, of a host in which nothing has been merged."""
    found = never_shrinks(len(slots))
    places = {place.name: place for place in host.sites}
    for s, slot in enumerate(slots):
        place = places[slot]
        widens = place.has_source and not place.obstacle and widening_obstacle(place.layers) is None
        if not widens:
            continue
        layers = set(nn.ModuleList(place.layers).modules())
        for other, name in enumerate(slots):
            if name == slot:
                continue
            user = places[name]
            if user.has_source:
                others = nn.ModuleList(user.layers).modules()
                found["users"][s, other] = bool(user.obstacle) or not layers.isdisjoint(others)
            else:
                found["inside"][s, other] = host.lies_inside(name, slot)
    return found


def _nothing_fits(topology: str, place: Place, registry: BlueprintRegistry) -> ConfigError:
    """Makes the error for a place where no blueprint fits, with the reasons."""
    kind = place.topology or topology
    names = registry.possible(kind, [True])
    obstacles = [registry.get(kind, name).obstacle(place) for name in names]
    # Several blueprints may have the same obstacle.
    reasons = "; ".join(dict.fromkeys(filter(None, obstacles)))
    return ConfigError(f"slot {place.name}: no blueprint fits between its source and its sink: {reasons}")


def _flops(recipe: Blueprint, place: Place, source: Tensor) -> float:
    """Returns the operations of a seed of ``recipe`` on a sample of ``source``."""
    if recipe.only_added:
        return _flops_on(recipe, place, source)
    # Seeds expect features in this order.
    if place.order:
        source = source.permute(place.order)
    return _flops_by_channels(recipe, place.channels, tuple(source.shape))


@lru_cache(maxsize=4096)
def _flops_by_channels(
    recipe: Blueprint,
    channels: int,
    shape: tuple[int, ...],
) -> float:
    """The same for a recipe that knows of its place no more than the channels; many envs ask for it."""
    return _flops_on(recipe, Place("", channels), torch.zeros(shape))


@training_state()
def _flops_on(recipe: Blueprint, place: Place, source: Tensor) -> float:
    # A body's weights are float32, whatever the dtype of the features.
    source = source.to(torch.promote_types(source.dtype, torch.float32))
    with seeded(0), torch.no_grad(), counting() as counter:
        try:
            recipe.body(place).to(source).eval()(source)
        except Exception:  # a user may have written it
            return 0.0
    return counter.get_total_flops() / len(source)


def _built_of(shapes: Sequence[torch.Size]) -> tuple[float, float, float]:
    """Returns a fourth of the number of matrices and kernels, and the fractions of parameters in kernels of more than
    one position and in vectors, of a body whose parameters have these shapes."""
    layers = 0
    in_kernels = 0
    in_vectors = 0
    for shape in shapes:
        size = math.prod(shape)
        is_vector = len(shape) < 2 or max(shape) == size  # also one of shape [C, 1, 1]
        if not is_vector:
            layers += 1
        if math.prod(shape[2:]) > 1:
            in_kernels += size
        elif is_vector:
            in_vectors += size
    total = max(sum(map(math.prod, shapes)), 1)  # a body may have no parameters
    return layers / 4, in_kernels / total, in_vectors / total


def _size(recipe: Blueprint, place: Place) -> int:
    """Returns the number of parameters of a seed with its gate, if it can have one."""
    with _named_errors(recipe, "be counted", place):
        size = recipe.size(place)
        if not recipe.only_added:
            size += gate_parameters(place.channels)
        if size < 1:  # 0 says that it does not fit
            raise ValueError(f"its `parameters` says {size}, and a seed needs some to train")
        return size


@contextmanager
def _named_errors(
    recipe: Blueprint,
    what: str,
    place: Place,
) -> Iterator[None]:
    """Turns an error of a blueprint, whose functions a user may have written, into a ConfigError that names it."""
    try:
        yield
    except Exception as error:
        where = f"{place.channels} channels"
        if recipe.only_added:
            where = f"the Place of slot {place.name}"
        if place.obstacle:
            where += f", whose layers are not known ({place.obstacle})"
        reason = f"cannot {what} for {where}: {type(error).__name__}: {error}"
        raise ConfigError(f"blueprint {recipe.name} {reason}; repair it, or leave it out of env.blueprints") from error
