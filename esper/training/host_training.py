"""One host in training: the network, sites of seeds, optimizers, generators and clocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from esper.config.resolved import HostTrainingConfig, ResolvedTask
from esper.config.task import Freeze
from esper.core.blend import Seed
from esper.core.blueprints import Blueprint
from esper.core.blueprints.adapted import Adapted
from esper.core.ramps import BlendStyle
from esper.core.site import PlantedSeed, Role, Site, guard_group_norm
from esper.data.split import Split
from esper.data.task import Task
from esper.hosts.grown import GrownHost
from esper.hosts.host import Host, features_at, layers_of
from esper.hosts.widen import resize, shapes_of
from esper.ops.optimizer import SGD, AdamW
from esper.training.batches import BatchLoader
from esper.training.metrics import HOST, EpochMetrics, SeedGradientCollector, finite_buffers
from esper.training.precision import Arithmetic
from esper.training.rng import RngHandle, RngStream, derive_seed, draws_globally, own_dropout, seeded
from esper.training.seed_pool import ParameterGroup, SeedPool
from esper.training.shadow import ShadowBuffers
from esper.training.tensors import buffers_of, parameters_of
from esper.training.warmup import SeedRate, WarmUp

if TYPE_CHECKING:
    from esper.training.native import NativePasses

MAX_CONFIGURATIONS = 256
"""Max configurations per validation pass."""
Layers = Mapping[str, list[tuple[Any, ...]]]
"""By slot, what has grown in a layer, as plain values, see :class:`LayerGrowth`."""


@dataclass(frozen=True)
class LayerGrowth:
    """A seed that has become a part of its host's layers."""

    blueprint: str
    before: int
    """Width of the layer before, in units."""
    after: int
    """Width of the layer with it; as before for a LoRA."""


class HostTraining:
    """A host and all that belongs to it. One thread or stream uses it during an epoch, and its owner between epochs.

    Memory is allocated once; :meth:`reset` refills it in place.
    """

    def __init__(
        self,
        index: int,
        task: Task,
        config: HostTrainingConfig,
        totals: EpochMetrics,
    ) -> None:
        self.index = index
        self.task = task
        self.config = config
        self.horizon = config.env.episode_length
        self.durations = config.durations
        self.device = task.device
        self.totals = totals
        """Sums of this host's passes."""
        self.arithmetic = Arithmetic(config.task.precision or task.precision, self.device)
        self.warmup = WarmUp(config, config.task.warmup_epochs, self.device)
        self.rate = self.warmup.rate  # a scalar that steps read on the device
        with seeded(0):  # overwritten by reset
            self.host = task.new_host(config.env.slots).to(self.device)
        self.frozen = freeze(self.host, config.task.freeze)
        """Layers that stay in eval mode."""
        self.dropout = torch.Generator(self.device)
        self.draws = RngHandle(self.dropout)
        own_dropout(self.host, self.draws)
        guard_group_norm(self.host)
        self.sample = task.sample
        self.host.probe(self.sample)
        self.host_draws_globally = draws_globally(self.host, self.sample)
        self.global_seeds: set[str] = set()
        """Names of sites whose seeds draw from the process's generators."""
        self.sites = [Site(place) for place in self.host.sites]
        """Sites in execution order."""
        self.site_by_name = {site.name: site for site in self.sites}
        self.seed_rates: dict[str, SeedRate] = {}
        """Learning rates of seeds by site, if they are not the host's."""
        if config.task.seed_rate != 1 or config.task.seed_warmup_epochs > 0:
            self.seed_rates = {name: SeedRate(config, self.warmup) for name in self.site_by_name}
        self.planted_at: dict[str, int] = {}
        """By site, the number of epochs that the host had trained when its seed was planted."""
        self.alphas = torch.zeros(2, len(self.sites), device=self.device)
        """Alphas, and target alphas of incubating seeds, [2, S]; steps read them on the device."""
        self.tried = torch.zeros(MAX_CONFIGURATIONS, len(self.sites), device=self.device)
        """Alphas of the validated configurations, [K, S]; the pass reads them on the device."""
        self.vacant: frozenset[int] = frozenset()
        """Sites at which an epoch's training passes do not change features."""
        self.shapes = 0
        """Number of times that tensors of the host have changed their shapes."""
        self.grown = False
        """Whether its layers have grown in this episode."""
        self.growths: dict[str, list[LayerGrowth]] = {}
        """By slot, what it has grown in its host that is still there, in order."""
        self.renew_host_group()
        self.seed_groups: dict[str, ParameterGroup] = {}
        self.shadows: dict[str, ShadowBuffers] = {}
        self.pool = SeedPool()
        self.repeat: Callable[[Hashable, Callable[[], None]], None] = do
        """Runs a repeated piece of work by key; on a GPU it may replay a CUDA graph instead."""
        self.native: NativePasses | None = None
        """Does epochs and validations in compiled code where it can; None: PyTorch does."""
        self.shadow_dropout: dict[str, torch.Generator] = {}
        self.gradient_stats = SeedGradientCollector(1 + len(self.sites), self.device)
        self.order = torch.Generator()
        self.feed = _make_feed(task, config.task, self.arithmetic.image_dtype)
        """Batches of data in memory; None for streamed data."""
        self.episode = -1
        self.epoch = 0
        self.batch = 0
        self.part = 0
        self.germinations = 0

    def reset(self, run_seed: int, episode: int) -> None:
        """Makes a new host for ``episode`` in the memory of the last one."""
        self.run_seed = run_seed
        self.episode = episode
        self.epoch = 0
        self.germinations = 0
        with seeded(self._seed(RngStream.HOST)):
            fresh = self.task.build_host().to(self.device)
            if any(map(is_lazy, fresh.parameters())):
                fresh.probe(self.sample)  # so they get their weights
        # Seeds of the last episode go; the pool keeps their memory.
        for site in self.sites:
            site.remove()
        self.seed_groups.clear()
        self.planted_at.clear()
        self.shadows.clear()
        self.take_shapes(shapes_of(fresh))
        self.grown = False
        self.growths = {}
        _overwrite(self.host, fresh)
        if self.native is not None:
            self.native.forget()
        self.finite_buffers = finite_buffers(self.host)
        self.host_group.optimizer.zero_state()
        self.arithmetic.reset()
        self.order.manual_seed(self._seed(RngStream.DATA))
        if self.feed is not None:
            self.feed.restart(derive_seed(run_seed, self.index, 0, RngStream.AUGMENTATION), episode)
        self.dropout.manual_seed(self._seed(RngStream.DROPOUT))
        self.totals.zero_training()
        self.gradient_stats.restart(())
        self.shadow_dropout.clear()
        self.global_seeds.clear()

    def take_shapes(self, shapes: Mapping[str, torch.Size]) -> None:
        """Gives the host's tensors these shapes, by name, before values are loaded into them."""
        if resize(self.host, shapes):
            self.renew_host_group()
            self.follow_layers()

    def renew_host_group(self) -> None:
        """Makes a new group of the host's parameters, with zero momentum."""
        task = self.config.task
        optimizer = _make_optimizer(self.host, task, self.rate, task.weight_decay)
        self.host_group = ParameterGroup(HOST, _learning(self.host), optimizer, None)

    def follow_layers(self) -> None:
        """Brings all that depends on the shapes of the host's tensors up to date."""
        self.shapes += 1
        self.grown = True
        self.host.follow_layers(self.sample)
        for site, place in zip(self.sites, self.host.sites, strict=True):
            site.place = place
        self.finite_buffers = finite_buffers(self.host)
        for shadow in self.shadows.values():
            shadow.refill()
        if self.native is not None:
            self.native.follow_layers()

    def plant(
        self,
        site: Site,
        blueprint: Blueprint,
        style: BlendStyle,
        leading: int | None = None,
    ) -> None:
        """Plants a seed after probing it on a few samples; it is absent from passes until the site gets another role.

        ``leading`` is that of ``Seed``. Raises GerminationFailed without changing the site, and ValueError for a site
        that has a seed.
        """
        if site.seed is not None:
            raise ValueError(f"{site.name} has a seed")
        probe = features_at(self.host, self.sample, [site.name])[site.name]

        def prepare(seed: Seed) -> Seed:
            own_dropout(seed, self.draws)
            if draws_globally(seed, probe.source):
                self.global_seeds.add(site.name)
            return self.pool.reuse(seed, (site.name, blueprint, style.operator))

        with seeded(self._seed(RngStream.SEED, self.germinations)):
            planted = site.plant(blueprint, style, probe, prepare, leading)
        self.germinations += 1
        self.planted_at[site.name] = self.epoch
        generator = torch.Generator(self.device).manual_seed(self._seed(RngStream.DROPOUT, self.germinations))
        self.shadow_dropout[site.name] = generator
        joins = self.config.env.at_once and blueprint.at_once
        group = self.group_of(site, planted.module, joins)
        self.seed_groups[site.name] = group
        if blueprint.copies is not None:
            modules = blueprint.copies(site.place)
            originals = chain.from_iterable(module.parameters() for module in modules)
            pairs = zip(planted.module.body.parameters(), originals, strict=True)
            group.take_state(pairs, self.host_group.optimizer)

    def remove(self, site: Site) -> None:
        """Drops the seed with its shadow buffers and its optimizer, so that the next one starts with its own."""
        site.remove()
        del self.seed_groups[site.name]
        self.planted_at.pop(site.name, None)
        self.global_seeds.discard(site.name)
        self.shadows.pop(site.name, None)

    def assign(
        self,
        site: Site,
        role: Role,
        alpha: float,
        target: float,
        learning: bool,
    ) -> None:
        """Sets what the seed of a site does from now on; one that is no longer incubated loses its shadow buffers."""
        site.assign(role, alpha, target, learning)
        if role is not Role.INCUBATING:
            self.shadows.pop(site.name, None)

    def group_of(self, site: Site, seed: Seed, joins: bool) -> ParameterGroup:
        """Returns the seed's parameter group with zero momentum; reused memory comes with its earlier optimizer.

        ``joins``: whether it is trained as a part of the host, clipped with it and with its weight decay.
        """
        group = self.pool.groups.get(seed)
        if group is None:
            rate = self.rate
            if site.name in self.seed_rates:
                rate = self.seed_rates[site.name].rate
            decay = self.config.task.weight_decay if joins else 0.0
            group = ParameterGroup(
                site.name,
                _learning(seed),
                _make_optimizer(seed, self.config.task, rate, decay),
                site,
                with_host=joins,
            )
            self.pool.groups[seed] = group
        group.optimizer.zero_state()
        return group

    def shadow_of(self, site: Site) -> ShadowBuffers:
        """Returns the buffers of ``site``'s incubating seed; the first call copies the host's current ones."""
        if site.name in self.shadows:
            return self.shadows[site.name]
        buffers = self.pool.shadows.get(site.name) or ShadowBuffers(self.host)
        self.pool.shadows[site.name] = buffers
        self.shadows[site.name] = buffers
        buffers.refill()
        return buffers

    @contextmanager
    def draws_of(self, site: Site) -> Iterator[None]:
        """Runs a block with the random numbers of ``site``'s incubating seed."""
        self.draws.generator = self.shadow_dropout[site.name]
        try:
            with self.global_draws(1 + self.sites.index(site)):
                yield
        finally:
            self.draws.generator = self.dropout

    def global_draws(self, place: int = 0) -> AbstractContextManager[None]:
        """Seeds and locks the process's generators for a pass, if this host's passes draw from them.

        ``place`` is 0 for the host's own pass, and 1 + s for the incubating seed at site s.
        """
        if not (self.host_draws_globally or self.global_seeds):
            return nullcontext()
        seed = self._seed(RngStream.GLOBAL, self.epoch, self.batch, place, self.part)
        return seeded(seed, self.device)

    def seeds(self) -> list[Seed]:
        """Returns the seeds in site order."""
        return [site.seed for site in self.sites if site.seed is not None]

    def fossils(self) -> dict[str, PlantedSeed]:
        """Returns the fossils by site name, in site order."""
        return {site.name: site.planted for site in self.sites if site.fossil and site.planted is not None}

    def network_tensors(self, slots: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter and buffer of the host and of the seeds in ``slots``, with the optimizers' state."""
        owners: list[tuple[nn.Module, ParameterGroup]] = [(self.host, self.host_group)]
        for slot in slots:
            seed = self.site_by_name[slot].seed
            group = self.seed_groups[slot]
            if seed is not None:
                owners.append((seed, group))
        for module, group in owners:
            for name, tensor in chain(parameters_of(module), buffers_of(module)):
                yield f"{group.name}.{name}", tensor
            for index, parameter in enumerate(group.parameters):
                state = group.optimizer.state.get(parameter, {})
                # SGD's momentum_buffer is known as momentum.
                for name, value in state.items():
                    if value is not None:
                        yield f"{group.name}.{name.removesuffix('_buffer')}.{index}", value

    def layers(self) -> Layers:
        """Returns what has grown in its layers, as plain values."""
        return {slot: list(map(astuple, growths)) for slot, growths in self.growths.items()}

    def take_layers(self, layers: Layers) -> None:
        """Takes over what :meth:`layers` has returned."""
        self.growths = {slot: [LayerGrowth(*growth) for growth in growths] for slot, growths in layers.items()}

    def discard(self, kept: Collection[str], saved: Mapping[str, Tensor], layers: Layers) -> None:
        """Removes all seeds but ``kept``, and gradients, and gives the layers the shapes of ``saved``; momentum is
        always saved. The scale of losses restarts."""
        for site in self.sites:
            if site.seed is not None and site.name not in kept:
                self.remove(site)
        self.take_shapes(shapes_in(saved))
        self.take_layers(layers)
        self.arithmetic.reset()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for group in (self.host_group, *self.seed_groups.values()):
            group.drop_gradients()

    def _seed(self, purpose: RngStream, *counters: int) -> int:
        return derive_seed(self.run_seed, self.index, self.episode, purpose, *counters)


def learning_groups(training: HostTraining) -> list[ParameterGroup]:
    """Returns the groups that this epoch's steps update: the host, then seeds in the order of their sites.

    So a captured step finds their statistics in the same rows, whenever the seeds were planted.
    """
    for group in training.seed_groups.values():
        learning = group.site is not None and group.site.learning
        for parameter in group.parameters:  # excludes those frozen by the blueprint
            parameter.requires_grad_(learning)
    seeds = [training.seed_groups[site.name] for site in training.sites if site.learning]
    return [training.host_group, *seeds]


def shapes_in(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Returns the shapes of a host's tensors, by name, from those of :meth:`HostTraining.network_tensors`."""
    return {name.removeprefix(f"{HOST}."): tensor.shape for name, tensor in tensors.items()}


def feed_of(training: HostTraining) -> BatchLoader:
    """Returns the batches of data in memory. Raises ValueError for streamed data, which hosts read together."""
    if training.feed is None:
        raise ValueError(f"env {training.index}: its data is streamed; expected data in memory")
    return training.feed


def do(_key: Hashable, work: Callable[[], None]) -> None:
    """Runs ``work`` directly."""
    work()


def _make_feed(task: Task, config: ResolvedTask, dtype: torch.dtype) -> BatchLoader | None:
    if not isinstance(task.train, Split):
        return None
    return BatchLoader(
        task.train,
        config.batch_size,
        config.samples_per_epoch,
        task.augmentation,
        dtype,
    )


def _learning(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _make_optimizer(
    module: nn.Module,
    task: ResolvedTask,
    rate: Tensor,
    weight_decay: float,
) -> SGD | AdamW:
    """Returns the task's optimizer for the parameters of ``module``; steps read the scalar ``rate`` on the device."""
    optimizer: SGD | AdamW
    if task.optimizer == "adamw":
        betas = (task.momentum, task.beta2)
        optimizer = AdamW(module.parameters(), betas=betas, weight_decay=weight_decay)
    else:
        optimizer = SGD(module.parameters(), momentum=task.momentum, weight_decay=weight_decay)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_state()
    return optimizer


def _overwrite(host: Host, fresh: Host) -> None:
    """Overwrites the host with a new one, in its own memory."""
    host.load_state_dict(fresh.state_dict())
    for buffer, initial in zip(host.buffers(), fresh.buffers(), strict=True):
        buffer.copy_(initial)  # including non-persistent buffers


def freeze(host: Host, which: Freeze) -> tuple[nn.Module, ...]:
    """Stops layers of ``host`` from learning; returns those that stay in eval mode.

    ``body`` are all layers but the head, which is the last layer with parameters. Statistics of frozen norms stay, too,
    so that the host without seeds computes the same ever after. New seeds and adapters that are built in learn.
    """
    if which == "nothing":
        return ()
    new = set[nn.Module]()
    if isinstance(host, GrownHost) and host.new_seeds:
        new.update(host.seeds.modules())
        for layer in host.modules():
            if isinstance(layer, Adapted):
                new.update(layer.adapter.modules())
    layers = [layer for layer in layers_of(host).values() if layer not in new]
    head = layers[-1:] if which == "body" else []
    for layer in layers:
        for parameter in layer.parameters(recurse=False):
            parameter.requires_grad_(layer in head)

    learning = new.union(head)
    old = [module for module in host.modules() if module not in new]
    # A module that contains one that learns stays in train mode.
    return tuple(module for module in old if learning.isdisjoint(module.modules()))
