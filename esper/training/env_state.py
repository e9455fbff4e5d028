"""One env's side of training: its host, slots, optimizers, generators and clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from esper.config import Durations, TrainingConfig
from esper.data.task import Split, Task
from esper.ops import SGD
from esper.seeds.blend import BlendStyle, Seed
from esper.seeds.blueprints import Blueprint
from esper.seeds.slot import SeedSlot, StageChange
from esper.seeds.stage import SeedStage
from esper.training.feed import Feed
from esper.training.gradient_stats import SeedGradientCollector
from esper.training.precision import Arithmetic, concrete
from esper.training.randomness import Draws, Purpose, derive_seed, draws_globally, own_dropout, seeded
from esper.training.shadow import ShadowBuffers
from esper.training.storage import ParameterGroup, SeedStorage
from esper.training.torch_faults import guard_group_norm
from esper.training.totals import EpochTotals
from esper.training.upload import upload

HOST = "host"

MOST_CONFIGURATIONS = 256
"""That one validation can try."""


class ParallelEnvState:
    """All that belongs to one env. Only its lane touches it during an epoch; between epochs, only the env's owner.

    Storage is made once; :meth:`reset` fills it again in place.
    """

    def __init__(self, index: int, task: Task, config: TrainingConfig, totals: EpochTotals) -> None:
        self.index = index
        self.task = task
        self.config = config
        self.horizon = _number(config.env.episode_length)
        self.durations = Durations.of(config, self.horizon)
        self.device = task.device
        self.totals = totals
        """What this env's passes add up."""
        self.arithmetic = Arithmetic(concrete(config.task.precision or task.precision, self.device), self.device)
        self.rate = torch.zeros((), dtype=torch.float64, device=self.device)
        """The learning rate of host and seeds, read by their steps on the device."""
        self.changes: list[StageChange] = []
        with seeded(0):  # overwritten by reset
            self.host = task.build_host().to(self.device)
        self.dropout = torch.Generator(self.device)
        self.draws = Draws(self.dropout)
        own_dropout(self.host, self.draws)
        guard_group_norm(self.host)
        self.sample = task.sample
        self.calibration = task.calibration_inputs() if config.env.recalibrate else None
        """Inputs that BatchNorm's statistics are estimated on for counterfactuals, where the config asks for it."""
        self.host.probe(self.sample)
        self.host_draws_globally = draws_globally(self.host, self.sample)
        self.global_seeds: set[str] = set()
        """Slots whose seeds draw from the process's generators."""
        self.slots = [SeedSlot(site, self.durations.embargo, self.changes.append) for site in self.host.sites]
        """In execution order."""
        self.alphas = torch.zeros(2, len(self.slots), device=self.device)
        """[2, S], for an epoch's steps to read on the device: alphas, and what incubating seeds are tried at."""
        self.tried = torch.zeros(MOST_CONFIGURATIONS, len(self.slots), device=self.device)
        """[K, S]: alphas of the configurations that are validated, for the pass to read on the device."""
        self.vacant: frozenset[int] = frozenset()
        """Sites of an epoch's training passes at which features are passed on as they are."""
        self.slot_by_name = {slot.name: slot for slot in self.slots}
        self.host_group = ParameterGroup(
            HOST, list(self.host.parameters()), self._optimizer(self.host, config.task.weight_decay), None
        )
        self.seed_groups: dict[str, ParameterGroup] = {}
        self.shadows: dict[str, ShadowBuffers] = {}
        self.storage = SeedStorage()
        self.repeat: Callable[[Hashable, Callable[[], None]], None] = do
        """How work that is done again and again is done, given what it is known by; a lane may have recorded it."""
        self.shadow_dropout: dict[str, torch.Generator] = {}
        self.collector = SeedGradientCollector(1 + len(self.slots), self.device)
        self.order = torch.Generator()
        self.feed = self._make_feed()
        """Where batches come from, of data that lies in memory."""
        self.episode = -1
        self.micro_batches = config.task.micro_batches
        """Parts that a batch is computed in: the config's until memory runs out."""
        self.evaluation_batch = task.evaluation_batch
        """Samples that are evaluated at once."""
        self.epoch = 0
        self.batch = 0
        self.part = 0
        self.germinations = 0
        self.host_parameters = self.host.parameter_count

    def reset(self, run_seed: int, episode: int) -> None:
        """A fresh host for ``episode``, in the storage of the last one."""
        self.run_seed, self.episode, self.epoch, self.germinations = run_seed, episode, 0, 0
        with seeded(self._seed(Purpose.HOST)):
            fresh = self.task.build_host().to(self.device)
            fresh.probe(self.sample)  # lazy layers have no weights before
        self.host.load_state_dict(fresh.state_dict())
        for own, first in zip(self.host.buffers(), fresh.buffers(), strict=True):
            own.copy_(first)  # those that no state_dict holds, too
        named = [(name, buffer) for name, buffer in self.host.named_buffers() if buffer.is_floating_point()]
        self.finite_buffers = {name for name, buffer in named if bool(buffer.isfinite().all())}
        """Those that become non-finite only where the host goes bad; a mask of −inf is none of them."""
        self.host_group.optimizer.zero_momentum()
        self.arithmetic.reset()
        self.order.manual_seed(self._seed(Purpose.DATA))
        if self.feed is not None:
            self.feed.restart(derive_seed(run_seed, self.index, 0, Purpose.AUGMENTATION), episode)
        self.dropout.manual_seed(self._seed(Purpose.DROPOUT))
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
        """Plant a seed, probed on a few samples. Raises GerminationFailed, with nothing changed."""
        probe = self._features_at(slot, self.sample)

        def prepare(seed: Seed) -> Seed:
            own_dropout(seed, self.draws)
            guard_group_norm(seed)
            if draws_globally(seed, probe):
                self.global_seeds.add(slot.name)
            return self.storage.house(seed, (slot.name, blueprint, style.operator))

        with seeded(self._seed(Purpose.SEED, self.germinations)):
            slot.germinate(blueprint, style, tempo, target, probe, prepare)
        self.germinations += 1
        assert slot.seed is not None
        generator = torch.Generator(self.device).manual_seed(self._seed(Purpose.DROPOUT, self.germinations))
        self.shadow_dropout[slot.name] = generator
        self.seed_groups[slot.name] = self._group_of(slot, slot.seed)

    def _group_of(self, slot: SeedSlot, seed: Seed) -> ParameterGroup:
        """The seed's optimizer, as at birth; where its memory has had a seed before, in the memory of that one's."""
        group = self.storage.groups.get(seed)
        if group is None:
            parameters = [parameter for parameter in seed.parameters() if parameter.requires_grad]
            group = ParameterGroup(slot.name, parameters, self._optimizer(seed, 0.0), slot)
            self.storage.groups[seed] = group
        group.optimizer.zero_momentum()
        return group

    def shadow_of(self, slot: SeedSlot) -> ShadowBuffers:
        """The buffers that ``slot``'s incubating seed keeps; they start as the host's are at the first call."""
        if slot.name not in self.shadows:
            kept = self.storage.shadows.get(slot.name)
            if kept is None:
                kept = self.storage.shadows[slot.name] = ShadowBuffers(self.host)
            kept.refill()
            self.shadows[slot.name] = kept
        return self.shadows[slot.name]

    def begin_shadows(self) -> None:
        """The buffers of seeds whose incubation begins with this epoch, before any step: one that was captured when
        another seed was in the slot does not ask for them."""
        for slot in self.slots if self.config.env.incubation == "shadow" else ():
            if slot.incubating:
                self.shadow_of(slot)

    @contextmanager
    def apart(self, slot: SeedSlot) -> Iterator[None]:
        """A training pass for ``slot``'s incubating seed, with buffers and random numbers that are not the host's."""
        with self.shadow_of(slot).in_place(), self.draws_of(slot):
            yield

    @contextmanager
    def draws_of(self, slot: SeedSlot) -> Iterator[None]:
        """Random numbers are those of ``slot``'s incubating seed."""
        with ExitStack() as kept:
            kept.enter_context(self.draws.using(self.shadow_dropout[slot.name]))
            if self.draws_globally:
                site = self.slots.index(slot)
                kept.enter_context(
                    seeded(self._seed(Purpose.GLOBAL, self.epoch, self.batch, 1 + site, self.part), device=self.device)
                )
            yield

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """The host's training pass; networks that draw from the process's generators take turns with others."""
        if not self.draws_globally:
            yield
            return
        with seeded(self._seed(Purpose.GLOBAL, self.epoch, self.batch, 0, self.part), device=self.device):
            yield

    @property
    def draws_globally(self) -> bool:
        """Whether a training pass takes random numbers that do not belong to this env alone."""
        return self.host_draws_globally or bool(self.global_seeds)

    def forget_removed_seeds(self) -> None:
        """Drop the optimizers of removed seeds, so that the next seed in a slot starts with its own (trap 15), and the
        statistics of seeds that are no longer incubated."""
        for name in [name for name in self.seed_groups if self.slot_by_name[name].seed is None]:
            del self.seed_groups[name]
            self.global_seeds.discard(name)
        for name in [name for name in self.shadows if not self.slot_by_name[name].incubating]:
            del self.shadows[name]

    def learning_groups(self) -> list[ParameterGroup]:
        """What this epoch's optimizer steps will move: the host, then seeds in the order of their slots, whichever was
        planted first, so that a captured step finds the statistics of each in the same row."""
        for group in self.seed_groups.values():
            for parameter in group.parameters:  # not those that the blueprint itself has frozen
                parameter.requires_grad_(group.slot is not None and group.slot.learning)
        return [self.host_group, *(self.seed_groups[slot.name] for slot in self.slots if slot.learning)]

    def set_learning_rate(self) -> None:
        """lr · (1 + cos(π t/T)) / 2 with t whole epochs on the host's clock; seeds follow the same clock."""
        rate = float(self.config.task.learning_rate or 0.0)
        if self.config.task.schedule == "cosine":
            rate *= (1 + math.cos(math.pi * self.epoch / self.horizon)) / 2
        self.rate.fill_(rate)

    def set_alphas(self) -> None:
        """What the epoch's steps will blend, and where."""
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
        """Parameters of all seeds, living and fossilized."""
        return sum(slot.parameters for slot in self.slots)

    def take_changes(self) -> list[StageChange]:
        """Stage changes since the last call, oldest first."""
        taken = self.changes[:]
        self.changes.clear()
        return taken

    def _features_at(self, slot: SeedSlot, x: Tensor) -> Tensor:
        """The features that ``slot`` sees for inputs ``x``, in eval mode so that no buffer of the host changes."""
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

    def _make_feed(self) -> Feed | None:
        task, sizes = self.task, self.config.task
        if not isinstance(task.train, Split):
            return None
        batch, samples = _number(sizes.batch_size), _number(sizes.samples_per_epoch)
        return Feed(task.train, batch, samples, task.augmentation, self.arithmetic.image_dtype)

    def _optimizer(self, module: nn.Module, weight_decay: float) -> SGD:
        optimizer = SGD(module.parameters(), self.rate, self.config.task.momentum, weight_decay)
        optimizer.zero_momentum()
        return optimizer

    def _seed(self, purpose: Purpose, *counters: int) -> int:
        return derive_seed(self.run_seed, self.index, self.episode, purpose, *counters)


def do(_key: Hashable, work: Callable[[], None]) -> None:
    """Do ``work`` as it is."""
    work()


def _number(value: int | None) -> int:
    if value is None:
        raise ValueError("the config has sizes left to the task; call esper.data.task.resolve first")
    return value
