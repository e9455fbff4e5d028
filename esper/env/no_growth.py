"""Hosts left alone, on the phase loop of the vector env: the no-growth baseline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esper.config_resolved import HostTrainingConfig
from esper.data.task import Task
from esper.env.baseline import SMALLEST_STD, Baseline
from esper.env.epoch_loop import EpochLoop
from esper.env.training_backend import TrainingBackend, make_trainings
from esper.seeds.blueprints import BLUEPRINTS
from esper.spaces.action import ActionSpec
from esper.telemetry.span import Spans
from esper.training.execution.lanes import Lanes
from esper.training.execution.multi_gpu import device_index
from esper.training.execution.tiers import prepare_hosts
from esper.training.host_trainer import HostTrainer
from esper.training.micro_batching import MicroBatchPolicy
from esper.training.placement import HostCopy

FIRST_INDEX = 1_000_000
"""Env index of the first baseline host: streams of random numbers that no env of a run shares."""


def no_growth_loop(
    trainer: HostTrainer, slots: tuple[str, ...], pinned: tuple[HostCopy, ...] = (), governed: bool = True
) -> tuple[EpochLoop, TrainingBackend]:
    """Returns a phase loop for the hosts of ``trainer``, each with the horizon of its own config, and its backend."""
    spans, config = Spans(), trainer.hosts[0].config
    hosts = TrainingBackend(trainer, ActionSpec(slots, ()), BLUEPRINTS, spans, pinned, governed=governed)
    return EpochLoop(hosts, config, [host.horizon for host in trainer.hosts], len(slots), None, spans), hosts


def measure_baseline(
    tasks: Sequence[Task], config: HostTrainingConfig, lanes: Lanes, run_seed: int, policy: MicroBatchPolicy
) -> Baseline:
    """Trains ``env.baseline_episodes`` hosts alone and validates them after every epoch.

    ``tasks`` is the task on each of the devices of ``lanes``; ``policy`` see HostTrainer.
    """
    count = config.env.baseline_episodes
    config = config.with_values(env={"stop_on": [], "recalibrate": False})  # whole episodes, with running statistics
    indices = range(FIRST_INDEX, FIRST_INDEX + count)
    of_host = [tasks[device_index(index, len(tasks))] for index in indices]
    training = make_trainings(of_host, [config] * count, indices, len(tasks))
    prepare_hosts(config.run, training, lanes)
    trainer = HostTrainer(tasks[0], training, lanes, policy)
    try:
        loop, _ = no_growth_loop(trainer, training[0].host.slot_names, governed=False)
        curves = [np.stack((state.accuracy, state.loss)) for state in loop.without_growth(run_seed)]
    finally:
        trainer.close()
    accuracy, loss = np.stack(curves, axis=1).transpose(0, 2, 1)  # each [E, T + 1]
    return Baseline(
        accuracy=tuple(accuracy.mean(axis=0).tolist()),
        loss=tuple(loss.mean(axis=0).tolist()),
        final_loss_std=max(float(loss[:, -1].std(ddof=1)) if count > 1 else 0.0, SMALLEST_STD),
        episodes=count,
    )
