"""Hosts left alone, on the phase loop of the vector env: the no-growth baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

import numpy as np

from esper.config_resolved import HostTrainingConfig
from esper.data.task import Task
from esper.env.baseline import MIN_STD, Baseline
from esper.env.epoch_loop import EpochLoop
from esper.env.ranked_backend import RankedBackend, spread
from esper.env.training_backend import TrainingBackend, make_trainings
from esper.lifecycle.slots import Floats
from esper.seeds.blueprints import BLUEPRINTS
from esper.spaces.action import ActionSpec
from esper.telemetry.span import Spans
from esper.training.execution.executor import Executor
from esper.training.execution.multi_gpu import device_index
from esper.training.execution.ranks import RunRanks
from esper.training.execution.tiers import prepare_hosts
from esper.training.host_trainer import HostTrainer
from esper.training.micro_batching import MicroBatchPolicy

FIRST_INDEX = 1_000_000
"""Env index of the first baseline host: streams of random numbers that no env of a run shares."""


def no_growth_loop(trainer: HostTrainer, slots: tuple[str, ...], pinned: int = 0) -> tuple[EpochLoop, TrainingBackend]:
    """Returns a phase loop for the hosts of ``trainer``, each with the horizon of its own config, and its backend."""
    spans, config = Spans(), trainer.hosts[0].config
    hosts = TrainingBackend(trainer, ActionSpec(slots, ()), BLUEPRINTS, spans, pinned)
    return EpochLoop(hosts, config, [host.horizon for host in trainer.hosts], len(slots), None, spans), hosts


def measure_baseline(
    tasks: Sequence[Task],
    config: HostTrainingConfig,
    executor: Executor,
    run_seed: int,
    policy: MicroBatchPolicy,
    count_epochs: Callable[[int], None],
    ranks: RunRanks | None = None,
) -> Baseline:
    """Trains ``env.baseline_episodes`` hosts alone and validates them after every epoch.

    ``tasks`` is the task on each of the devices of ``executor``; ``policy`` see HostTrainer; ``count_epochs`` see
    SlotVectorEnv. ``ranks`` are those that hosts are spread over, if any.
    """
    count = config.env.baseline_episodes
    config = config.with_values(env={"stop_on": [], "recalibrate": False})  # whole episodes, with running statistics
    indices = range(FIRST_INDEX, FIRST_INDEX + count)
    mine = indices if ranks is None else indices[: len(ranks.share(count))]
    of_host = [tasks[device_index(index, len(tasks))] for index in mine]
    training = make_trainings(of_host, [config] * len(mine), mine, len(tasks))
    prepare_hosts(config.run, training, executor)
    with ExitStack() as opened:
        trainer = opened.enter_context(closing(HostTrainer(tasks[0], training, executor, policy)))
        slots, spans = training[0].host.slot_names, Spans()
        local = TrainingBackend(trainer, ActionSpec(slots, ()), BLUEPRINTS, spans, governed=False)
        local.count_epochs = count_epochs
        hosts = local if ranks is None else opened.enter_context(spread(RankedBackend(ranks, local, config, indices)))
        loop = EpochLoop(hosts, config, [training[0].horizon] * count, len(slots), None, spans)
        curves: list[Floats] = []
        for state in loop.without_growth(run_seed):
            if curves:  # the first state is that of untrained hosts
                count_epochs(count)
            curves.append(np.stack((state.accuracy, state.loss)))
    accuracy, loss = np.stack(curves, axis=1).transpose(0, 2, 1)  # each [E, T + 1]
    return Baseline(
        accuracy=tuple(accuracy.mean(axis=0).tolist()),
        loss=tuple(loss.mean(axis=0).tolist()),
        final_loss_std=max(float(loss[:, -1].std(ddof=1)) if count > 1 else 0.0, MIN_STD),
        episodes=count,
    )
