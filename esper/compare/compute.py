"""Compute cost of growing: floating-point operations of training and validation, by PyTorch's own counter.

The cost of an epoch depends on which seeds are in the host, their roles, and which configurations are validated. Each
such kind of epoch is run once on a few samples under ``torch.utils.flop_counter``; its count is multiplied by its
number of samples and by how often it occurred. Counted are forward and backward passes of the host and its seeds, the
extra pass of every incubating seed, and validation in every counterfactual configuration. What is
counted of a pass is said in ``esper.hosts.example.counting``; optimizer steps and the controller are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from esper.config.resolved import HostTrainingConfig
from esper.core.blueprints import BlueprintRegistry
from esper.core.ramps import BlendStyle
from esper.core.site import Role, Site
from esper.data.split import SAMPLE, Split
from esper.data.task import Task
from esper.env.training_backend import EnvHost, TrainingBackend
from esper.hosts.example import counting
from esper.hosts.widen import shapes_of
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.step import add_gradients, prepare_epoch
from esper.training.validate import Configuration, evaluate


@dataclass(frozen=True)
class Occupant:
    """A seed that takes part in passes, and its part in them."""

    blueprint: str
    style: BlendStyle
    incubating: bool = False
    learning: bool = True
    leading: int | None = None
    """See ``Seed``."""


@dataclass(frozen=True)
class EpochKind:
    """All that determines the cost of an epoch."""

    occupants: tuple[Occupant | None, ...]
    """Occupant of each site; None for an empty site."""
    configurations: tuple[Configuration, ...]
    """Configurations validated after it; distinct alphas are kept distinct, but their values are normalised."""
    shapes: tuple[tuple[str, torch.Size], ...] = ()
    """Shapes of the host's tensors, by name, if its layers have grown."""

    @classmethod
    def of(cls, host: EnvHost) -> EpochKind:
        """Returns the kind of the epoch that was just validated; call it before the host changes again."""
        # Alphas are normalised site by site, that is, by column.
        columns = zip(*host.counterfactual.configurations, strict=True)
        configurations = zip(*map(_branching, columns), strict=True)
        shapes: tuple[tuple[str, torch.Size], ...] = ()
        if host.training.grown:
            shapes = tuple(shapes_of(host.training.host).items())
        return cls(
            tuple(map(_occupant, host.training.sites)),
            tuple(configurations),
            shapes,
        )

    @classmethod
    def alone(cls, sites: int) -> EpochKind:
        """Returns the kind of a host without seeds."""
        return cls((None,) * sites, ((0.0,) * sites,))


def watch(hosts: TrainingBackend) -> list[None]:
    """Begins to note the kind of each epoch."""
    hosts.look = EpochKind.of
    return []


def episodes(hosts: TrainingBackend) -> list[list[EpochKind]]:
    """Returns the kinds of the epochs of each host's episode, that of the untrained host first."""
    return hosts.seen


def _occupant(site: Site) -> Occupant | None:
    seed = site.planted
    if seed is None or site.role is Role.ABSENT:
        return None
    learning = site.incubating or site.learning
    return Occupant(
        seed.blueprint.name,
        seed.style,
        site.incubating,
        learning,
        seed.module.leading,
    )


def _branching(alphas: Sequence[float]) -> list[float]:
    """Normalises a site's alphas, keeping which ones are equal: the k-th distinct nonzero value becomes 1 / k."""
    normalised = {0.0: 0.0}
    for alpha in alphas:
        if alpha not in normalised:
            normalised[alpha] = 1 / len(normalised)
    return [normalised[alpha] for alpha in alphas]


class ComputeMeter:
    """Counts the floating-point operations of one task's hosts, as the config trains them."""

    def __init__(self, task: Task, config: HostTrainingConfig, blueprints: BlueprintRegistry) -> None:
        self.task = task
        self.config = config
        self.blueprints = blueprints
        # Bounded by the number of ways to fill the slots; an entry is two numbers.
        self.a_sample = lru_cache(maxsize=None)(self._a_sample)

    def flops(self, episode: Sequence[EpochKind]) -> float:
        """Returns the operations of an episode; the first is the untrained host, which is only validated."""
        untrained, *epochs = episode
        trained = sum(times * sum(self.of_epoch(kind)) for kind, times in Counter(epochs).items())
        _, validation = self.of_epoch(untrained)
        return trained + validation

    def of_epoch(self, kind: EpochKind) -> tuple[float, float]:
        """Returns the operations of one epoch of this kind: (training, validation after it)."""
        training, validation = self.a_sample(kind)
        return training * self.config.trained_samples, validation * len(self.task.validation)

    def _a_sample(self, kind: EpochKind) -> tuple[float, float]:
        """Returns the operations of this kind per sample: (training, validation)."""
        stand_in = self._stand_in(kind)
        split = self.task.validation
        x = self.task.sample
        n = len(x)
        y = split.y[:n]
        prepare_epoch(stand_in)
        with counting() as training:
            add_gradients(stand_in, x, y, None)
        few = Split(split.x[:SAMPLE], y, split.table)
        with counting() as validation:
            evaluate(stand_in, few, list(kind.configurations))
        return training.get_total_flops() / n, validation.get_total_flops() / n

    def _stand_in(self, kind: EpochKind) -> HostTraining:
        """Returns a throwaway host whose slots are filled like this kind, for counting on a few samples."""
        (metrics,) = make_metrics(1, self.task.device)
        stand_in = HostTraining(0, self.task, self.config, metrics)
        stand_in.reset(0, 0)
        stand_in.take_shapes(dict(kind.shapes))
        for site, occupant in zip(stand_in.sites, kind.occupants, strict=True):
            if occupant is None:
                continue
            blueprint = self.blueprints.at(stand_in.host.topology, site.place, occupant.blueprint)
            stand_in.plant(site, blueprint, occupant.style, occupant.leading)
            role = Role.INCUBATING if occupant.incubating else Role.BLENDED
            stand_in.assign(site, role, 0.5, 1.0, learning=occupant.learning)
        return stand_in
