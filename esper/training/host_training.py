"""The training state of one env: its host, slots, optimizers, generators and clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from esper.config_resolved import HostTrainingConfig
from esper.data.task import Split, Task
from esper.ops import SGD
from esper.seeds.blend import BlendStyle, Seed
from esper.seeds.blueprints import Blueprint
from esper.seeds.slot import SeedSlot, StageChange
from esper.seeds.stage import SeedStage
from esper.training.batches import BatchLoader
from esper.training.execution.torch_faults import guard_group_norm
from esper.training.gradient_stats import SeedGradientCollector
from esper.training.metrics import EpochMetrics
from esper.training.precision import Arithmetic, concrete
from esper.training.rng import RngHandle, RngStream, derive_seed, draws_globally, own_dropout, seeded
from esper.training.seed_pool import ParameterGroup, SeedPool
from esper.training.shadow import ShadowBuffers
from esper.training.upload import upload

HOST = "host"

MAX_CONFIGURATIONS = 256
"""Max configurations per validation pass."""


class HostTraining:
    """Everything that belongs to one env. Only its lane uses it during an epoch; between epochs, only the env's owner.

    Storage is allocated once; :meth:`reset` refills it in place.
    """

    def __init__(self, index: int, task: Task, config: HostTrainingConfig, totals: EpochMetrics) -> None:
        self.index = index
        self.task = task
        self.config = config
        self.horizon = config.env.episode_length
        self.durations = config.durations
        self.device = task.device
        self.totals = totals
        """Sums of this env's passes."""
        self.arithmetic = Arithmetic(concrete(config.task.precision, self.device), self.device)
        self.rate = torch.zeros((), dtype=torch.float64, device=self.device)
        """Learning rate of host and seeds, a float64 scalar that their steps read on the device."""
        self.changes: list[StageChange] = []
        with seeded(0):  # overwritten by reset
            self.host = task.build_host().to(self.device)
        self.dropout = torch.Generator(self.device)
        self.draws = RngHandle(self.dropout)
        own_dropout(self.host, self.draws)
        guard_group_norm(self.host)
        self.sample = task.sample
        self.calibration = task.calibration_inputs() if config.env.recalibrate else None
        """Inputs for estimating BatchNorm's statistics in counterfactuals; None without ``env.recalibrate``."""
        self.host.probe(self.sample)
        self.host_draws_globally = draws_globally(self.host, self.sample)
        self.global_seeds: set[str] = set()
        """Names of slots whose seeds draw from the process's generators."""
        self.slots = [SeedSlot(site, self.durations.embargo, self.changes.append) for site in self.host.sites]
        """Slots in execution order."""
        self.alphas = torch.zeros(2, len(self.slots), device=self.device)
        """Alphas, and target alphas of incubating seeds, [2, S]; steps read them on the device."""
        self.tried = torch.zeros(MAX_CONFIGURATIONS, len(self.slots), device=self.device)
        """Alphas of the validated configurations, [K, S]; the pass reads them on the device."""
        self.vacant: frozenset[int] = frozenset()
        """Sites at which an epoch's training passes do not change features."""
        self.slot_by_name = {slot.name: slot for slot in self.slots}
        self.host_group = ParameterGroup(
            HOST, list(self.host.parameters()), self._optimizer(self.host, config.task.weight_decay), None
        )
        self.seed_groups: dict[str, ParameterGroup] = {}
        self.shadows: dict[str, ShadowBuffers] = {}
        self.storage = SeedPool()
        self.repeat: Callable[[Hashable, Callable[[], None]], None] = do
        """Runs a repeated piece of work by key; a GPU lane may replay a CUDA graph instead."""
        self.shadow_dropout: dict[str, torch.Generator] = {}
        self.collector = SeedGradientCollector(1 + len(self.slots), self.device)
        self.order = torch.Generator()
        self.feed = self._make_feed()
        """Batches of data in memory; None for streamed data."""
        self.episode = -1
        self.micro_batches = config.task.micro_batches
        """Number of parts in which a batch is computed: the config's until memory runs out."""
        self.evaluation_batch = task.evaluation_batch
        """Samples per evaluation batch."""
        self.epoch = 0
        self.batch = 0
        self.part = 0
        self.germinations = 0
        self.host_parameters = self.host.parameter_count

    def reset(self, run_seed: int, episode: int) -> None:
        """Makes a new host for ``episode`` in the storage of the last one."""
        self.run_seed, self.episode, self.epoch, self.germinations = run_seed, episode, 0, 0
        with seeded(self._seed(RngStream.HOST)):
            fresh = self.task.build_host().to(self.device)
            fresh.probe(self.sample)  # lazy layers get their weights here
        self.host.load_state_dict(fresh.state_dict())
        for own, first in zip(self.host.buffers(), fresh.buffers(), strict=True):
            own.copy_(first)  # including non-persistent buffers
        named = [(name, buffer) for name, buffer in self.host.named_buffers() if buffer.is_floating_point()]
        self.finite_buffers = {name for name, buffer in named if bool(buffer.isfinite().all())}
        """Names of buffers that are finite at first, so that only a bad host makes them non-finite (no −inf masks)."""
        self.host_group.optimizer.zero_momentum()
        self.arithmetic.reset()
        self.order.manual_seed(self._seed(RngStream.DATA))
        if self.feed is not None:
            self.feed.restart(derive_seed(run_seed, self.index, 0, RngStream.AUGMENTATION), episode)
        self.dropout.manual_seed(self._seed(RngStream.DROPOUT))
        self.totals.zero_training()
        self.seed_groups.clear()
        self.shadows.clear()
        self.shadow_dropout.clear()
        self.global_seeds.clear()
        for slot in self.slots:
            slot.clear()
        self.changes.clear()
        self.collector.begin(())

    def germinate(self, slot: SeedSlot, blueprint: Blueprint, style: BlendStyle, tempo: int, target: float) -> None:
        """Plants a seed after probing it on a few samples. Raises GerminationFailed without changing the slot."""
        probe = self._features_at(slot, self.sample)

        def prepare(seed: Seed) -> Seed:
            own_dropout(seed, self.draws)
            guard_group_norm(seed)
            if draws_globally(seed, probe):
                self.global_seeds.add(slot.name)
            return self.storage.house(seed, (slot.name, blueprint, style.operator))

        with seeded(self._seed(RngStream.SEED, self.germinations)):
            slot.germinate(blueprint, style, tempo, target, probe, prepare)
        self.germinations += 1
        assert slot.seed is not None
        generator = torch.Generator(self.device).manual_seed(self._seed(RngStream.DROPOUT, self.germinations))
        self.shadow_dropout[slot.name] = generator
        self.seed_groups[slot.name] = self._group_of(slot, slot.seed)

    def _group_of(self, slot: SeedSlot, seed: Seed) -> ParameterGroup:
        """Returns the seed's parameter group with zero momentum; reused memory comes with its earlier optimizer."""
        group = self.storage.groups.get(seed)
        if group is None:
            parameters = [parameter for parameter in seed.parameters() if parameter.requires_grad]
            group = ParameterGroup(slot.name, parameters, self._optimizer(seed, 0.0), slot)
            self.storage.groups[seed] = group
        group.optimizer.zero_momentum()
        return group

    def shadow_of(self, slot: SeedSlot) -> ShadowBuffers:
        """Returns the buffers of ``slot``'s incubating seed; the first call copies the host's current ones."""
        if slot.name not in self.shadows:
            kept = self.storage.shadows.get(slot.name)
            if kept is None:
                kept = self.storage.shadows[slot.name] = ShadowBuffers(self.host)
            kept.refill()
            self.shadows[slot.name] = kept
        return self.shadows[slot.name]

    def begin_shadows(self) -> None:
        """Makes the buffers of seeds whose incubation begins with this epoch.

        This is done before any step, because a step that was captured with an earlier seed does not make them.
        """
        for slot in self.slots if self.config.env.incubation == "shadow" else ():
            if slot.incubating:
                self.shadow_of(slot)

    @contextmanager
    def apart(self, slot: SeedSlot) -> Iterator[None]:
        """Runs a training pass with the buffers and random numbers of ``slot``'s incubating seed, not the host's."""
        with self.shadow_of(slot).in_place(), self.draws_of(slot):
            yield

    @contextmanager
    def draws_of(self, slot: SeedSlot) -> Iterator[None]:
        """Runs a block with the random numbers of ``slot``'s incubating seed."""
        with ExitStack() as kept:
            kept.enter_context(self.draws.using(self.shadow_dropout[slot.name]))
            if self.draws_globally:
                site = self.slots.index(slot)
                kept.enter_context(
                    seeded(
                        self._seed(RngStream.GLOBAL, self.epoch, self.batch, 1 + site, self.part), device=self.device
                    )
                )
            yield

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Runs the host's training pass; if it draws from the process's generators, these are seeded and locked."""
        if not self.draws_globally:
            yield
            return
        with seeded(self._seed(RngStream.GLOBAL, self.epoch, self.batch, 0, self.part), device=self.device):
            yield

    @property
    def draws_globally(self) -> bool:
        """True if a training pass draws from the process's generators."""
        return self.host_draws_globally or bool(self.global_seeds)

    def forget_removed_seeds(self) -> None:
        """Drops the optimizers of removed seeds, so that the next seed in a slot starts with its own (trap 15), and the
        shadow buffers of seeds that are no longer incubated."""
        for name in [name for name in self.seed_groups if self.slot_by_name[name].seed is None]:
            del self.seed_groups[name]
            self.global_seeds.discard(name)
        for name in [name for name in self.shadows if not self.slot_by_name[name].incubating]:
            del self.shadows[name]

    def learning_groups(self) -> list[ParameterGroup]:
        """Returns the groups that this epoch's steps update: the host, then seeds in the order of their slots.

        The order does not depend on when seeds were planted, so that a captured step finds their statistics in the same
        rows.
        """
        for group in self.seed_groups.values():
            for parameter in group.parameters:  # excludes those frozen by the blueprint
                parameter.requires_grad_(group.slot is not None and group.slot.learning)
        return [self.host_group, *(self.seed_groups[slot.name] for slot in self.slots if slot.learning)]

    def set_learning_rate(self) -> None:
        """Sets lr · (1 + cos(π t/T)) / 2, with t in whole epochs of the host, also for seeds; or lr if constant."""
        rate = float(self.config.task.learning_rate or 0.0)
        if self.config.task.schedule == "cosine":
            rate *= (1 + math.cos(math.pi * self.epoch / self.horizon)) / 2
        self.rate.fill_(rate)

    def set_alphas(self) -> None:
        """Uploads the alphas of the epoch's steps and sets ``vacant``."""
        alphas = [[slot.alpha.alpha for slot in self.slots], [slot.incubation_target for slot in self.slots]]
        upload(torch.tensor(alphas), self.alphas)
        self.vacant = frozenset(site for site, slot in enumerate(self.slots) if not (slot.incubating or slot.blended))

    def fossils(self) -> list[SeedSlot]:
        return [slot for slot in self.slots if slot.stage is SeedStage.FOSSILIZED]

    @property
    def fossil_parameters(self) -> int:
        return sum(slot.parameters for slot in self.fossils())

    @property
    def seed_parameters(self) -> int:
        """Number of parameters of all seeds, living and fossilized."""
        return sum(slot.parameters for slot in self.slots)

    def take_changes(self) -> list[StageChange]:
        """Returns the stage changes since the last call, oldest first."""
        taken = self.changes[:]
        self.changes.clear()
        return taken

    def _features_at(self, slot: SeedSlot, x: Tensor) -> Tensor:
        """Returns the features of inputs ``x`` at ``slot``, in eval mode so that no buffer of the host changes."""
        site, found = self.slots.index(slot), list[Tensor]()

        def keep(reached: int, h: Tensor) -> Tensor:
            if reached == site:
                found.append(self.host.kept(h))
            return h

        training = self.host.training
        self.host.eval()
        with self.host.without_gradients():
            self.host.walk(x, keep)
        self.host.train(training)
        return found[0]

    def _make_feed(self) -> BatchLoader | None:
        task, sizes = self.task, self.config.task
        if not isinstance(task.train, Split):
            return None
        batch, samples = sizes.batch_size, sizes.samples_per_epoch
        return BatchLoader(task.train, batch, samples, task.augmentation, self.arithmetic.image_dtype)

    def _optimizer(self, module: nn.Module, weight_decay: float) -> SGD:
        optimizer = SGD(module.parameters(), self.rate, self.config.task.momentum, weight_decay)
        optimizer.zero_momentum()
        return optimizer

    def _seed(self, purpose: RngStream, *counters: int) -> int:
        return derive_seed(self.run_seed, self.index, self.episode, purpose, *counters)


def do(_key: Hashable, work: Callable[[], None]) -> None:
    """Runs ``work`` directly."""
    work()
