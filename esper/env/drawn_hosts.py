"""Hosts of which each has a context of its own, that of its episode, in one process or spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.config import RunConfig
from esper.config.resolved import HostTrainingConfig, ResolvedConfig
from esper.core.action import ActionSpec
from esper.core.arrays import Bools
from esper.core.blueprints import BLUEPRINTS
from esper.core.slots import Slots
from esper.core.state import Choices, EnvState
from esper.data.task import Task
from esper.data.task import resolve as resolve_task
from esper.env.catalog import BlueprintCatalog
from esper.env.merging import Merger
from esper.env.rank_hosts import RankedBackend, RankGroup, RankServer
from esper.env.training_backend import TrainingBackend
from esper.exam.context import VALIDATION, WIDEST, Context, task_of
from esper.exam.sources import load_source
from esper.telemetry.span import Spans
from esper.training.counterfactual import max_configurations
from esper.training.execution.ranks import RunRanks
from esper.training.execution.tiers import make_executor, prepare_hosts
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics

Contexts = NDArray[np.object_]
"""A :class:`Context` for each host, [E]."""

_MERGERS: dict[tuple[Any, ...], Merger] = {}
"""By architecture, and what can be planted: finding the sizes of one takes longer than an epoch."""

_task_of = lru_cache(maxsize=4)(task_of)
"""Neighbours often have the same context."""


class DrawnHosts(TrainingBackend):
    """Hosts in training, each of the context of its episode.

    Args:
        first: the context of a host that stands for all until they are drawn.
        indices: env indices of the hosts.
        run: workers and device of this process.
        config: that of all hosts, but for what their contexts say.
        spec: the slots and blueprints.
        spans: the phases.
    """

    def __init__(
        self,
        first: Context,
        indices: Sequence[int],
        run: RunConfig,
        config: ResolvedConfig,
        spec: ActionSpec,
        spans: Spans,
    ) -> None:
        self.config = config
        self.spec = spec
        self.contexts: Contexts = np.full(len(indices), None)
        self._indices = indices
        self._totals = make_metrics(
            len(indices),
            torch.device("cpu"),
            max_configurations(len(spec.slots)),
            VALIDATION,
        )
        host = self._host(0, first)
        executor = make_executor(run, torch.device("cpu"))
        self.execution = prepare_hosts(run, [host], executor)
        self.first = self._merger(host, first)
        """Knows the sizes of the host of the first context."""
        super().__init__(
            HostTrainer(host.task, [host] * len(indices), executor),
            self.first.catalog,
            spans,
        )
        # So they are in all hosts, also if the first one is too wide for some.
        self.at_once = np.ones(len(spec.blueprints), dtype=np.bool_)
        self.only_added = np.ones(len(spec.blueprints), dtype=np.bool_)

    def draw(self, where: Bools, contexts: Contexts) -> list[Choices]:
        """Gives the hosts of ``where`` bool [E] their ``contexts`` [E], with new hosts where these are others.

        Returns the sizes of these hosts, as they are when they are new, and of their possible seeds.
        """
        sizes = []
        for row in np.flatnonzero(where).tolist():
            context = contexts[row]
            if context != self.contexts[row]:
                self.contexts[row] = context
                training = self._host(row, context)
                self.trainer.replace(row, training)
                self.hosts[row] = self.host_of(training, row, self._merger(training, context))
            host = self.hosts[row]
            sizes.append(host.merger.sizes_of_new(host.training))
        return sizes

    def _host(self, row: int, context: Context) -> HostTraining:
        task = _task_of(context)
        return HostTraining(self._indices[row], task, self._config_of(task), self._totals[row])

    def _config_of(self, task: Task) -> HostTrainingConfig:
        """Returns the config of one env, with what the task says."""
        of_task = {
            "episode_length": task.episode_length,
            "slots": None,
        }
        config = self.config.with_values(env=of_task)
        return resolve_task(config, task)

    def _merger(self, training: HostTraining, context: Context) -> Merger:
        """Returns what knows the sizes of hosts of this architecture, in all envs of the process."""
        source = load_source(context.source)
        key = (
            context.width,
            source.classes,
            source.x[0].shape,
            self.spec,
            self.config.env.at_once,
        )
        if key not in _MERGERS:
            host = training.host
            widest = WIDEST[context.topology]
            if source.images:
                widest *= 2  # the second block has twice the width of the first one
            _MERGERS[key] = Merger(
                BlueprintCatalog(
                    host.topology,
                    host.sites,
                    BLUEPRINTS,
                    self.spec,
                    widest,
                )
            )
        return _MERGERS[key]


class RankDrawnHosts(RankGroup, DrawnHosts):
    """Those of a rank other than the first, see :func:`make_on_rank`."""


class RankedDrawnHosts(RankedBackend):
    """The hosts of all ranks, on rank 0.

    Args:
        local: the hosts of this rank, the first ones.
        first: the context of the hosts until they are drawn.
    """

    def __init__(self, ranks: RunRanks, local: DrawnHosts, first: Context) -> None:
        config = local.config
        super().__init__(ranks, local, config, range(config.env.n_envs), partial(make_on_rank, first=first))

    def draw(self, where: Bools, contexts: Contexts) -> list[Choices]:
        """Gives hosts of all ranks their contexts, see :meth:`DrawnHosts.draw`."""
        sizes = []
        for _, of_rank in self._on_all(DrawnHosts.draw, where, contexts, where=where):
            sizes += of_rank
        return sizes


def make_on_rank(
    server: RankServer,
    name: int,
    config: ResolvedConfig,
    spec: ActionSpec,
    indices: Sequence[int],
    _governed: bool,
    first: Context,
) -> None:
    """Makes the group ``name`` of hosts on the rank of ``server``; all of them are governed."""
    run = server.ranks.own(config.run)
    group = RankDrawnHosts(first, indices, run, config, spec, Spans())
    count = len(indices)
    group.state = EnvState.fresh(count, slots=Slots.fresh(count, len(spec.slots)))
    server.groups[name] = group
