"""Hosts of which each has a context of its own, that of its episode, in one process or spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
from esper.exam.context import VALIDATION, WIDEST, task_of
from esper.exam.sources import load_source
from esper.telemetry.span import Spans
from esper.training.counterfactual import max_configurations
from esper.training.execution.ranks import Call, RunRanks
from esper.training.execution.tiers import make_executor, prepare_hosts
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics

Contexts = NDArray[np.object_]
"""A :class:`Context` for each host, [E]."""

_task_of = lru_cache(maxsize=4)(task_of)
"""Neighbours often have the same context."""


class DrawnHosts(TrainingBackend):
    """Hosts in training, each of the context of its episode.

    Args:
        contexts: those of the first hosts, until :meth:`draw` gives others, [E].
        indices: env indices of the hosts.
        run: workers and device of this process.
        config: that of all hosts, but for what their contexts say.
        spec: the slots and blueprints.
        spans: the phases.
    """

    def __init__(
        self,
        contexts: Contexts,
        indices: Sequence[int],
        run: RunConfig,
        config: ResolvedConfig,
        spec: ActionSpec,
        spans: Spans,
    ) -> None:
        self.config = config
        self.spec = spec
        self.registry = BLUEPRINTS.copy()
        self.contexts = contexts.copy()
        self._indices = indices
        self._mergers: dict[tuple[Any, ...], Merger] = {}
        self._totals = make_metrics(
            len(indices),
            torch.device("cpu"),
            max_configurations(len(spec.slots)),
            VALIDATION,
        )
        hosts = [self._host(row) for row in range(len(indices))]
        executor = make_executor(run, torch.device("cpu"))
        self.execution = prepare_hosts(run, hosts, executor)
        super().__init__(
            HostTrainer(hosts[0].task, hosts, executor),
            self._merger(hosts[0], 0).catalog,
            spans,
        )
        # So they are in all hosts, also if the first one is too wide for some.
        self.at_once = np.ones(len(spec.blueprints), dtype=np.bool_)
        self.only_added = np.ones(len(spec.blueprints), dtype=np.bool_)
        for row, host in enumerate(self.hosts):
            host.merger = self._merger(host.training, row)

    def draw(self, where: Bools, contexts: Contexts) -> list[Choices]:
        """Gives the hosts of ``where`` bool [E] their ``contexts`` [E], with new hosts where these are others.

        Returns the sizes of these hosts, as they are when they are new, and of their possible seeds.
        """
        sizes = []
        for row in np.flatnonzero(where).tolist():
            if contexts[row] != self.contexts[row]:
                self.contexts[row] = contexts[row]
                training = self._host(row)
                self.trainer.replace(row, training)
                self.hosts[row] = self.host_of(training, row, self._merger(training, row))
            host = self.hosts[row]
            sizes.append(host.merger.sizes_of_new(host.training))
        return sizes

    def _host(self, row: int) -> HostTraining:
        task = _task_of(self.contexts[row])
        return HostTraining(self._indices[row], task, self._config_of(task), self._totals[row])

    def _config_of(self, task: Task) -> HostTrainingConfig:
        """Returns the config of one env, with what the task says."""
        of_task = {
            "episode_length": task.episode_length,
            "slots": None,
        }
        config = self.config.with_values(env=of_task)
        return resolve_task(config, task)

    def _merger(self, training: HostTraining, row: int) -> Merger:
        """Returns what knows the sizes of hosts of this architecture."""
        context = self.contexts[row]
        source = load_source(context.source)
        key = (context.width, source.classes, source.x[0].shape)
        if key not in self._mergers:
            host = training.host
            widest = WIDEST[context.topology]
            if source.images:
                widest *= 2  # the second block has twice the width of the first one
            self._mergers[key] = Merger(
                BlueprintCatalog(
                    host.topology,
                    host.sites,
                    self.registry,
                    self.spec,
                    widest,
                )
            )
        return self._mergers[key]


class RankDrawnHosts(RankGroup, DrawnHosts):
    """Those of a rank other than the first, with the state of their envs as rank 0 sent it last; the arguments are
    those of :class:`DrawnHosts` from the first to ``spec``."""

    def __init__(
        self,
        contexts: Contexts,
        indices: Sequence[int],
        run: RunConfig,
        config: ResolvedConfig,
        spec: ActionSpec,
    ) -> None:
        count = len(indices)
        self.state = EnvState.fresh(count, slots=Slots.fresh(count, len(spec.slots)))
        DrawnHosts.__init__(self, contexts, indices, run, config, spec, Spans())


class RankedDrawnHosts(RankedBackend):
    """The hosts of all ranks, on rank 0.

    Args:
        local: the hosts of this rank, the first ones.
        contexts: those of all hosts, [E].
    """

    def __init__(self, ranks: RunRanks, local: DrawnHosts, contexts: Contexts) -> None:
        self._first = contexts
        super().__init__(ranks, local, local.config, range(len(contexts)))

    def draw(self, where: Bools, contexts: Contexts) -> list[Choices]:
        """Gives hosts of all ranks their contexts, see :meth:`DrawnHosts.draw`."""
        sizes = []
        for _, of_rank in self._on_all(DrawnHosts.draw, where, contexts, where=where):
            sizes += of_rank
        return sizes

    def _making(
        self,
        indices: Sequence[int],
        rows: slice,
        config: ResolvedConfig,
    ) -> Call:
        return make_on_rank, self.name, config, self._first[rows], tuple(indices), self.local.catalog.spec


def make_on_rank(
    server: RankServer,
    name: int,
    config: ResolvedConfig,
    contexts: Contexts,
    indices: Sequence[int],
    spec: ActionSpec,
) -> None:
    """Makes the group ``name`` of hosts on the rank of ``server``."""
    run = server.ranks.own(config.run)
    server.groups[name] = RankDrawnHosts(contexts, indices, run, config, spec)
