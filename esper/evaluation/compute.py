"""Compute cost of growing: floating-point operations of training and validation, by PyTorch's own counter.

The cost of an epoch depends on which seeds are in the host, their roles, and which configurations are validated. Each
such kind of epoch is run once on a few samples under ``torch.utils.flop_counter``; its count is multiplied by its
number of samples and by how often it occurred. Counted are forward and backward passes of the host and its seeds, the
extra pass of every incubating seed, and validation in every counterfactual configuration. What is
counted of a pass is said in ``esper.hosts.flops``; optimizer steps and the controller are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from esper.config_resolved import HostTrainingConfig
from esper.data.split import SAMPLE, Split
from esper.data.task import Task
from esper.env.env_host import EnvHost
from esper.env.training_backend import TrainingBackend
from esper.hosts.flops import counting
from esper.lifecycle.ramps import BlendStyle
from esper.seeds.blueprints import BlueprintRegistry
from esper.seeds.site import Role, Site
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.step import add_gradients, prepare_epoch
from esper.training.validate import Configuration, evaluate

INCUBATING, LEARNING, FROZEN = "incubating", "learning", "frozen"


@dataclass(frozen=True)
class Occupant:
    """A seed that takes part in passes, and its role."""

    blueprint: str
    style: BlendStyle
    role: str


@dataclass(frozen=True)
class EpochKind:
    """All that determines the cost of an epoch."""

    occupants: tuple[Occupant | None, ...]
    """Occupant of each site; None if there is none."""
    configurations: tuple[Configuration, ...]
    """Configurations validated after it; distinct alphas are kept distinct, but their values are normalised."""

    @classmethod
    def of(cls, host: EnvHost) -> EpochKind:
        """Returns the kind of the epoch that was just validated; call it before the host changes again."""
        columns = zip(*host.counterfactual.configurations, strict=True)  # the alphas of one site each
        configurations = zip(*(_branching(alphas) for alphas in columns), strict=True)
        return cls(tuple(_occupant(site) for site in host.training.sites), tuple(configurations))

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
    role = INCUBATING if site.incubating else LEARNING if site.learning else FROZEN
    return Occupant(seed.blueprint.name, seed.style, role)


def _branching(alphas: Sequence[float]) -> list[float]:
    """Normalises a site's alphas, keeping which ones are equal: the k-th distinct nonzero value becomes 1 / k."""
    known = {alpha: 1 / number for number, alpha in enumerate(dict.fromkeys(filter(None, alphas)), 1)}
    return [known.get(alpha, 0.0) for alpha in alphas]


class ComputeMeter:
    """Counts the floating-point operations of one task's hosts, as the config trains them."""

    def __init__(self, task: Task, config: HostTrainingConfig, blueprints: BlueprintRegistry) -> None:
        self.task, self.config, self.blueprints = task, config, blueprints
        # Bounded by the number of ways to fill the slots; an entry is two numbers.
        self.a_sample = lru_cache(maxsize=None)(self._a_sample)

    def flops(self, episode: Sequence[EpochKind]) -> float:
        """Returns the operations of an episode; the first is the untrained host, which is only validated."""
        untrained, *epochs = episode
        trained = sum(times * sum(self.of_epoch(kind)) for kind, times in Counter(epochs).items())
        return trained + self.of_epoch(untrained)[1]

    def of_epoch(self, kind: EpochKind) -> tuple[float, float]:
        """Returns the operations of one epoch of this kind: (training, validation after it)."""
        training, validation = self.a_sample(kind)
        return training * self.config.trained_samples, validation * len(self.task.validation)

    def _a_sample(self, kind: EpochKind) -> tuple[float, float]:
        """Returns the operations of this kind per sample: (training, validation)."""
        stand_in = self._stand_in(kind)
        task, x = self.task, self.task.sample
        y = task.validation.y[: len(x)]
        prepare_epoch(stand_in)
        with counting() as training:
            add_gradients(stand_in, x, y, None)
        few = Split(task.validation.x[:SAMPLE], y, task.validation.table)
        calibrate = None if stand_in.calibration is None else stand_in.calibration[: len(x)]
        with counting() as validation:
            evaluate(stand_in, few, list(kind.configurations), calibrate)
        a_sample = validation.get_total_flops() / len(x)
        if stand_in.calibration is not None:  # half of the passes calibrate, on these samples instead of the split
            a_sample *= (1 + len(stand_in.calibration) / len(task.validation)) / 2
        return training.get_total_flops() / len(x), a_sample

    def _stand_in(self, kind: EpochKind) -> HostTraining:
        """Returns a throwaway host whose slots are filled like this kind, for counting on a few samples."""
        stand_in = HostTraining(0, self.task, self.config, make_metrics(1, self.task.device)[0])
        stand_in.reset(0, 0)
        for site, occupant in zip(stand_in.sites, kind.occupants, strict=True):
            if occupant is not None:
                blueprint = self.blueprints.at(stand_in.host.topology, site.place, occupant.blueprint)
                stand_in.plant(site, blueprint, occupant.style)
                role = Role.INCUBATING if occupant.role == INCUBATING else Role.BLENDED
                stand_in.assign(site, role, 0.5, 1.0, learning=occupant.role != FROZEN)
        return stand_in
