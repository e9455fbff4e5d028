"""Hosts without growth, each with its own architecture or length, trained the same way as the env trains hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esper.attribution.counterfactual import max_configurations
from esper.config_resolved import ResolvedConfig
from esper.data.task import Task, resolve
from esper.env.baseline import Baseline
from esper.env.context import RunContext
from esper.env.episode import Episode, transfer
from esper.evaluation.arm_runner import HostResult
from esper.evaluation.compute import ComputeMeter
from esper.seeds.blueprints import BlueprintRegistry
from esper.spaces.action import Action, ActionSpec, Op
from esper.training.execution.tiers import make_lanes
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.placement import copies_to_pin
from esper.training.rng import seeded
from esper.training.validate import evaluate


@dataclass(frozen=True)
class FixedHost:
    """A host to train: the task says how it is built, the config how long it trains."""

    task: Task
    config: ResolvedConfig


def train_fixed(
    hosts: Sequence[FixedHost], run_seed: int, episode: int, spec: ActionSpec, blueprints: BlueprintRegistry
) -> list[HostResult]:
    """Trains host i as env i of the run seed in that episode.

    It gets the same initial weights for the same layers, the same batches, the same phases of an epoch and the same
    governor. All tasks must have the same data. ``host_parameters`` and ``facts`` of the results describe the host that
    was trained.
    """
    task, config = hosts[0].task, hosts[0].config
    with seeded(0):
        sites = len(task.build_host().sites)
    totals = make_metrics(
        len(hosts),
        task.device,
        configurations=max_configurations(sites),
        samples=len(task.validation),
        language=task.validation.y.dim() == 2,
    )
    training = [HostTraining(i, host.task, resolve(host.config, host.task), totals[i]) for i, host in enumerate(hosts)]
    unknown = Baseline((), (), 1.0, 0)  # not used here: there are no rewards and no reports
    pinned = copies_to_pin(config.run, training)
    episodes = [
        Episode(training, RunContext(training.config, spec, blueprints, unknown, lambda _event: None, pinned))
        for training in training
    ]
    meters = [ComputeMeter(host.task, host.config, blueprints) for host in hosts]
    with make_lanes(config.run, task.device) as lanes:
        trainer = HostTrainer(task, training, lanes, pinned=pinned)
        try:
            _play(episodes, run_seed, episode, trainer, meters, Action.decode(spec.encode(Op.WAIT)))
        finally:
            trainer.close()
        accuracy = np.zeros(len(hosts))

        def measure(training: HostTraining) -> None:
            found = evaluate(training, training.task.test, [(0.0,) * len(training.slots)])
            accuracy[training.index] = float(found.accuracy[0])

        lanes.run(measure, training)
    return [
        HostResult(
            accuracy=float(accuracy[i]),
            loss=played.measurement.committed_loss,
            parameters=float(played.training.host_parameters),
            host_parameters=float(played.training.host_parameters),
            flops=meters[i].flops(i),
            epochs=float(played.epoch),
            rollbacks=float(played.governor.rollbacks),
            fossils=0.0,
            facts={"validation_accuracy": played.measurement.committed},
        )
        for i, played in enumerate(episodes)
    ]


def _play(
    episodes: list[Episode],
    run_seed: int,
    number: int,
    trainer: HostTrainer,
    meters: list[ComputeMeter],
    wait: Action,
) -> None:
    """Runs the phases of the env's steps with WAIT as the only action."""
    for episode in episodes:
        episode.reset(run_seed, number)
    trainer.repeatable(Episode.validate, episodes)
    transfer(episodes)
    for episode in episodes:
        meters[episode.index].watch(episode)
        episode.begin()
    while active := [episode for episode in episodes if not episode.done]:
        for episode in active:
            episode.act(wait)
        trainer.epoch([episode.training for episode in active])
        trainer.repeatable(Episode.validate, active)
        transfer(active)
        for episode in active:
            meters[episode.index].watch(episode)
            episode.govern()
            episode.tick()
            episode.close_epoch()
