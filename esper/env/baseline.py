"""The no-growth baseline: the mean curve of the same host left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.config_resolved import HostTrainingConfig
from esper.data.task import Task
from esper.training.execution.multi_gpu import AnyLanes, device_index
from esper.training.execution.tiers import prepare_hosts
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.micro_batching import Parts
from esper.training.placement import HostCopy, copies_to_pin
from esper.training.validate import evaluate

Floats = NDArray[np.float64]

FIRST_INDEX = 1_000_000
"""Env index of the first baseline host: streams of random numbers that no env of a run shares."""

SMALLEST_STD = 1e-3


@dataclass(frozen=True)
class Baseline:
    """Curves by epochs done, 0 to T; accuracy is pp on the validation split."""

    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    final_loss_std: float
    """Standard deviation over hosts of the last loss, at least 1e-3."""
    episodes: int

    def in_stds(self, loss: Floats) -> Floats:
        """Losses [...] in standard deviations of the final loss.

        A loss counts as no worse than the baseline's worst, that of the untrained host, and one that is not finite
        counts as that: how much worse than guessing a broken network is says nothing, and a reward stays finite.
        """
        return np.asarray(np.fmin(loss, max(self.loss)) / self.final_loss_std)

    def check(self, horizon: int) -> None:
        """Raises ValueError when the curves are not those of an episode of ``horizon`` epochs."""
        if len(self.accuracy) != horizon + 1 or len(self.loss) != horizon + 1:
            raise ValueError(
                f"the baseline has {len(self.accuracy) - 1} epochs, the episode {horizon}: measure it again"
            )


def measure_baseline(
    tasks: Sequence[Task], config: HostTrainingConfig, lanes: AnyLanes, run_seed: int, parts: Parts | None = None
) -> Baseline:
    """Train ``env.baseline_episodes`` hosts alone and validate them after every epoch.

    ``tasks`` is the task on each of the devices of ``lanes``; ``parts`` see HostTrainer.
    """
    count, horizon = config.env.baseline_episodes, config.env.episode_length
    indices = range(FIRST_INDEX, FIRST_INDEX + count)
    places = {index: tasks[device_index(index, len(tasks))] for index in indices}
    envs = [HostTraining(i, task, config, make_metrics(1, task.device)[0]) for i, task in places.items()]
    curves = {training.index: np.zeros((2, horizon + 1)) for training in envs}

    def validate(training: HostTraining) -> None:
        result = evaluate(training, training.task.validation, [(0.0,) * len(training.slots)])
        curves[training.index][:, training.epoch] = float(result.accuracy[0]), float(result.loss[0])

    prepare_hosts(config.run, envs, lanes)
    for training in envs:
        training.reset(run_seed, episode=0)
    pinned = copies_to_pin(config.run, envs, kept=(HostCopy.EPOCH_START,))
    trainer = HostTrainer(tasks[0], envs, lanes, parts, pinned)
    try:
        trainer.repeatable(validate, envs)
        for _ in range(horizon):
            trainer.epoch(envs)
            trainer.repeatable(validate, envs)
    finally:
        trainer.close()
    accuracy, loss = np.stack(list(curves.values()), axis=1)  # each [count, T + 1]
    return Baseline(
        accuracy=tuple(accuracy.mean(axis=0).tolist()),
        loss=tuple(loss.mean(axis=0).tolist()),
        final_loss_std=max(float(loss[:, -1].std(ddof=1)) if count > 1 else 0.0, SMALLEST_STD),
        episodes=count,
    )
