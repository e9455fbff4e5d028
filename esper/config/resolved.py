"""A config whose sizes are all known: nothing is left to the task, so no field that a run reads is None."""

from __future__ import annotations

from esper.config.task import Optimizer, Precision, TaskConfig
from esper.config.training import Durations, EnvConfig, RunConfig, TrainingConfig
from esper.config.types import Count, Fraction, Names, NonNegative, Positive


class ResolvedRun(RunConfig):
    rounds: Count


class ResolvedEnv(EnvConfig):
    n_envs: Count
    episode_length: Count
    slots: Names | None
    at_once: bool


class ResolvedTask(TaskConfig):
    batch_size: Count
    samples_per_epoch: Count
    learning_rate: Positive
    warmup_epochs: NonNegative
    optimizer: Optimizer
    weight_decay: NonNegative
    label_smoothing: Fraction
    precision: Precision


class ResolvedConfig(TrainingConfig):
    """The config of a run; ``esper.data.task.resolve`` and ``esper.env.planted.resolve`` make it."""

    run: ResolvedRun
    env: ResolvedEnv

    @property
    def durations(self) -> Durations:
        """Durations in epochs for an episode of ``env.episode_length``."""
        return Durations.of(self, self.env.episode_length)

    @property
    def trained_samples(self) -> int:
        """Number of samples that a host trains on in an epoch: full batches only, none if hosts are simulated."""
        return 0


class HostTrainingConfig(ResolvedConfig):
    """The config of a run whose hosts are trained on data."""

    task: ResolvedTask

    @property
    def trained_samples(self) -> int:
        return self.task.samples_per_epoch // self.task.batch_size * self.task.batch_size
