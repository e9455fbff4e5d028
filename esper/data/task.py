"""A task: a host, three disjoint splits of data, and the sizes that suit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.config import ConfigError, TrainingConfig
from esper.hosts.host import Host


@dataclass(frozen=True)
class Split:
    """Inputs float32 [N, ...] and targets int64 [N], resident in memory."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device) -> Split:
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Task:
    """What hosts are trained on. Rewards, gates and the governor see validation only; test is read by reports only."""

    name: str
    description: str
    classes: int
    build_host: Callable[[], Host]
    train: Split
    validation: Split
    test: Split
    learning_rate: float
    batch_size: int
    samples_per_epoch: int
    n_envs: int
    episode_length: int
    rounds: int
    """Rounds of a run whose controller does not learn."""
    learning_rounds: int
    """Rounds of a run whose controller learns."""

    def to(self, device: torch.device) -> Task:
        """The same task with its splits on ``device``."""
        splits = {name: getattr(self, name).to(device) for name in ("train", "validation", "test")}
        return replace(self, **splits)


@dataclass(frozen=True)
class TaskEntry:
    """A line of the table of known tasks; ``load`` reads the data."""

    name: str
    description: str
    load: Callable[[], Task]


def resolve(config: TrainingConfig, task: Task) -> TrainingConfig:
    """The config with the task's numbers in place of None. Raises ConfigError for a batch that the data cannot fill."""
    chosen = config.task
    samples = chosen.samples_per_epoch or task.samples_per_epoch
    batch = chosen.batch_size or task.batch_size
    if samples > len(task.train):
        raise ConfigError(
            f"task.samples_per_epoch is {samples}, but {task.name} has {len(task.train)} training samples"
        )
    if batch > samples:
        raise ConfigError(f"task.batch_size is {batch}, larger than the {samples} samples of an epoch of {task.name}")
    return config.with_values(
        task={
            "samples_per_epoch": samples,
            "batch_size": batch,
            "learning_rate": chosen.learning_rate or task.learning_rate,
        },
        env={
            "n_envs": config.env.n_envs or task.n_envs,
            "episode_length": config.env.episode_length or task.episode_length,
        },
        run={"rounds": config.run.rounds or (task.learning_rounds if config.run.learns else task.rounds)},
    )
