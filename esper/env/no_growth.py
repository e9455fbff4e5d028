"""Hosts left alone, on the phase loop of the vector env: the no-growth baseline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
    spans = Spans(marks=False)
    hosts = TrainingBackend(trainer, ActionSpec(slots, ()), BLUEPRINTS, spans, pinned, governed=governed)
    training = hosts.training
    loop = EpochLoop(hosts, training[0].config, [each.horizon for each in training], len(slots), None, spans)
    return loop, hosts


def measure_baseline(
    tasks: Sequence[Task],
    config: HostTrainingConfig,
    lanes: Lanes,
    run_seed: int,
    policy: MicroBatchPolicy | None = None,
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
        accuracy, loss = _curves(loop, run_seed).transpose(0, 2, 1)  # each [E, T + 1]
    finally:
        trainer.close()
    return Baseline(
        accuracy=tuple(accuracy.mean(axis=0).tolist()),
        loss=tuple(loss.mean(axis=0).tolist()),
        final_loss_std=max(float(loss[:, -1].std(ddof=1)) if count > 1 else 0.0, SMALLEST_STD),
        episodes=count,
    )


def _curves(loop: EpochLoop, run_seed: int) -> NDArray[np.float64]:
    """Returns validation accuracy and loss by epochs done, [2, T + 1, E]."""
    state = loop.state
    loop.start(state.done.copy(), run_seed)
    curves = [np.stack((state.accuracy, state.loss))]
    while not state.done.all():
        loop.wait()
        curves.append(np.stack((state.accuracy, state.loss)))
    return np.stack(curves, axis=1)
