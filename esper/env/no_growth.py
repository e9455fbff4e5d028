"""Hosts left alone, on the phase loop of the vector env: the no-growth baseline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

import numpy as np

from esper.config.resolved import HostTrainingConfig
from esper.core.action import ActionSpec
from esper.core.blueprints import BLUEPRINTS
from esper.core.slots import Floats
from esper.core.state import MIN_STD, Baseline
from esper.data.task import Task
from esper.env.catalog import BlueprintCatalog
from esper.env.epoch_loop import EpochLoop
from esper.env.rank_hosts import RankedBackend
from esper.env.training_backend import TrainingBackend, accuracy_by_class
from esper.telemetry.span import Spans
from esper.training.execution.ranks import RunRanks
from esper.training.execution.tiers import prepare_hosts
from esper.training.executor import Executor
from esper.training.host_trainer import HostTrainer, device_index, make_trainings

FIRST_INDEX = 1_000_000
"""Env index of the first baseline host: streams of random numbers that no env of a run shares."""


def no_growth_loop(
    trainer: HostTrainer,
) -> tuple[EpochLoop, TrainingBackend]:
    """Returns a phase loop for the hosts of ``trainer``, each with the horizon of its own config, and its backend."""
    spans = Spans()
    catalog = _no_blueprints(trainer)
    hosts = TrainingBackend(trainer, catalog, spans)
    horizons = [host.horizon for host in trainer.hosts]
    return EpochLoop(hosts, trainer.hosts[0].config, horizons, catalog.spec, spans), hosts


def _no_blueprints(trainer: HostTrainer) -> BlueprintCatalog:
    """Returns a catalog for hosts in which nothing is planted."""
    host = trainer.hosts[0].host
    return BlueprintCatalog(host.topology, (), BLUEPRINTS, ActionSpec(host.slot_names, ()))


def measure_baseline(
    tasks: Sequence[Task],
    config: HostTrainingConfig,
    executor: Executor,
    run_seed: int,
    ranks: RunRanks | None = None,
) -> Baseline:
    """Trains ``env.baseline_episodes`` hosts alone and validates them after every epoch.

    ``tasks`` is the task on each of the devices of ``executor``; ``ranks`` are those that hosts are spread over.
    """
    count = config.env.baseline_episodes
    config = config.with_values(env={"stop_on": []})  # whole episodes
    indices = range(FIRST_INDEX, FIRST_INDEX + count)
    # This rank has the first hosts.
    mine = indices
    if ranks is not None:
        mine = indices[: len(ranks.share(count))]

    of_host = [tasks[device_index(index, len(tasks))] for index in mine]
    training = make_trainings(of_host, [config] * len(mine), mine, len(tasks))
    prepare_hosts(config.run, training, executor)

    with ExitStack() as opened:
        trainer = HostTrainer(tasks[0], training, executor)
        opened.enter_context(closing(trainer))
        catalog = _no_blueprints(trainer)
        spans = Spans()
        local = TrainingBackend(trainer, catalog, spans, governed=False)
        hosts: TrainingBackend | RankedBackend = local
        if ranks is not None:
            hosts = RankedBackend(ranks, local, config, indices)
            opened.callback(hosts.release)

        horizons = [training[0].horizon] * count
        loop = EpochLoop(hosts, config, horizons, catalog.spec, spans)
        accuracies: list[Floats] = []
        losses: list[Floats] = []
        for state in loop.without_growth(run_seed):
            accuracies.append(state.accuracy.copy())
            losses.append(state.loss.copy())
        by_class = np.array(hosts.map_hosts(accuracy_by_class))
    return _baseline(np.stack(accuracies), np.stack(losses), by_class)


def _baseline(accuracy: Floats, loss: Floats, by_class: Floats) -> Baseline:
    """Returns the mean curves of hosts; ``accuracy`` and ``loss`` are [T + 1, E], ``by_class`` [E, C]."""
    # Hosts are the last axis: the last bits of a sum depend on the layout.
    final_loss = loss[-1]
    std = 0.0
    if len(final_loss) > 1:
        std = float(final_loss.std(ddof=1))
    return Baseline(
        accuracy=tuple(accuracy.mean(axis=1).tolist()),
        loss=tuple(loss.mean(axis=1).tolist()),
        final_loss_std=max(std, MIN_STD),
        episodes=len(final_loss),
        class_accuracy=tuple(by_class.mean(axis=0).tolist()),
    )
