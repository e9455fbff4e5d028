"""Hosts without growth, each with its own architecture or length, trained the same way as the env trains hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from esper.config_resolved import ResolvedConfig
from esper.data.task import Task, resolve
from esper.env.no_growth import no_growth_loop
from esper.env.training_backend import make_trainings
from esper.evaluation.compute import ComputeMeter
from esper.evaluation.runner import HostResult
from esper.seeds.blueprints import BlueprintRegistry
from esper.training.execution.tiers import make_lanes
from esper.training.host_trainer import HostTrainer
from esper.training.placement import copies_to_pin


@dataclass(frozen=True)
class FixedHost:
    """A host to train: the task says how it is built, the config how long it trains."""

    task: Task
    config: ResolvedConfig


def train_fixed(
    hosts: Sequence[FixedHost], run_seed: int, episode: int, blueprints: BlueprintRegistry
) -> list[HostResult]:
    """Trains host i as env i of the run seed in that episode.

    It gets the same initial weights for the same layers, the same batches, the same phases of an epoch and the same
    governor. All tasks must have the same data. ``host_parameters`` and ``facts`` of the results describe the host that
    was trained.
    """
    task, config = hosts[0].task, hosts[0].config
    configs = [resolve(host.config, host.task) for host in hosts]
    training = make_trainings([host.task for host in hosts], configs, range(len(hosts)))
    meters = [ComputeMeter(host.task, host.config, blueprints) for host in hosts]
    with make_lanes(config.run, task.device) as lanes:
        pinned = copies_to_pin(config.run, training)
        trainer = HostTrainer(task, training, lanes)
        try:
            loop, alone = no_growth_loop(trainer, training[0].host.slot_names, pinned)
            alone.watch = lambda host: meters[host.row].watch(host)
            loop.state.episode[:] = episode - 1
            *_, state = loop.without_growth(run_seed)
            accuracy = alone.test_accuracy(state)
        finally:
            trainer.close()
    return [
        HostResult(
            accuracy=float(accuracy[i]),
            loss=float(state.committed_loss[i]),
            parameters=float(each.host_parameters),
            host_parameters=float(each.host_parameters),
            flops=meters[i].flops(i),
            epochs=float(state.epoch[i]),
            rollbacks=float(state.rollbacks[i]),
            fossils=0.0,
            facts={"validation_accuracy": float(state.committed[i])},
        )
        for i, each in enumerate(training)
    ]
