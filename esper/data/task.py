"""A task: a host, three disjoint splits of data, and the sizes that suit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from esper.config import ConfigError, Precision, TrainingConfig
from esper.hosts.host import Host
from esper.ops import stage_images

Sample = tuple[Tensor, Tensor]

SAMPLE = 3

MOST_CHANNELS = 32
"""Of images that lie in memory as bytes."""

PAD = -100
"""Target of what does not count, such as the tokens behind the end of a text."""


@dataclass(frozen=True)
class Augmentation:
    """How a training image is changed each time it is seen; only what leaves its meaning alone."""

    crop: int = 0
    """Pixels of value 0 put on every side, before a window of the image's size is cut out anywhere; 0 cuts nothing."""
    flip: bool = False
    """Whether half of them are mirrored left to right."""


@dataclass(frozen=True)
class Split:
    """Samples resident in memory: inputs x [N, ...], and targets y int64, [N] for classes or [N, T] for tokens.

    With a ``table``, float32 [C, 256], inputs are images of bytes, x uint8 [N, H, W, C], and networks see
    ``table[c, pixel]`` as float32 [B, C, H, W] in channels_last.
    """

    x: Tensor
    y: Tensor
    table: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device) -> Split:
        table = None if self.table is None else self.table.to(device)
        return Split(self.x.to(device), self.y.to(device), table)

    def inputs(self, first: int, last: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Samples ``first`` to ``last`` − 1 as networks see them; ``dtype`` is for those made from bytes."""
        if self.table is None:
            return self.x[first:last]
        rows = torch.arange(first, min(last, len(self)), device=self.x.device)
        return stage_images(self.x, rows, self.table, out=self.empty(len(rows), dtype))[0]

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Room for ``count`` inputs, not filled."""
        if self.table is None:
            return self.x.new_empty((count, *self.x.shape[1:]))
        _, height, width, channels = self.x.shape
        shape = (count, channels, height, width)
        return torch.empty(shape, dtype=dtype, device=self.x.device, memory_format=torch.channels_last)

    @cached_property
    def counts(self) -> NDArray[np.float64]:
        """Targets of each sample that count, [N]: 1 for a class, the tokens that are no padding for a text."""
        if self.y.dim() == 1:
            return np.ones(len(self.y))
        return np.asarray((self.y != PAD).sum(dim=1).double().cpu())

    def check(self, name: str, classes: int) -> None:
        """Raises ConfigError for what cannot be trained on."""
        if len(self.x) != len(self.y) or not len(self.y):
            raise ConfigError(f"{name}: {len(self.x)} inputs and {len(self.y)} targets; expected as many, 1 or more")
        self._check_table(name)
        if self.y.dtype != torch.int64 or self.y.dim() not in (1, 2):
            raise ConfigError(
                f"{name}: targets are {self.y.dtype} of shape {tuple(self.y.shape)}; expected int64, [N] or [N, T]"
            )
        known = self.y if self.y.dim() == 1 else self.y[self.y != PAD]
        if not len(known) or int(known.min()) < 0 or int(known.max()) >= classes:
            raise ConfigError(f"{name}: targets must lie between 0 and {classes - 1}; padding of tokens is {PAD}")
        if not self.counts.all():
            raise ConfigError(f"{name}: sample {int(self.counts.argmin())} contains only padding")
        if self.x.is_floating_point():
            finite = self.x.isfinite().flatten(1).all(dim=1)
            if not finite.all():
                raise ConfigError(f"{name}: the inputs of sample {int((~finite).int().argmax())} are not finite")

    def _check_table(self, name: str) -> None:
        if self.table is None:
            return
        wanted = (self.x.shape[-1], 256)
        if self.x.dtype != torch.uint8 or self.x.dim() != 4 or self.y.dim() != 1:
            raise ConfigError(
                f"{name}: with a table, inputs are uint8 [N, H, W, C] and targets [N]; not {self.x.dtype} of shape "
                f"{tuple(self.x.shape)} and {tuple(self.y.shape)}"
            )
        if self.table.dtype != torch.float32 or tuple(self.table.shape) != wanted:
            raise ConfigError(
                f"{name}: the table is {self.table.dtype} of shape {tuple(self.table.shape)}; images of {wanted[0]} "
                f"channels need float32 {wanted}, see esper.ops.normalisation_table"
            )
        if not min(self.x.shape) > 0 or wanted[0] > MOST_CHANNELS:
            raise ConfigError(
                f"{name}: uint8 images need 1 to {MOST_CHANNELS} channels and some pixels; not {tuple(self.x.shape)}"
            )
        for what, tensor in {"inputs": self.x, "targets": self.y, "the table": self.table}.items():
            if not tensor.is_contiguous():
                raise ConfigError(
                    f"{name}: with a table, {what} must be contiguous; call .contiguous() after a permute or a slice"
                )


@dataclass(frozen=True)
class Task:
    """What hosts are trained on. Rewards, gates and the governor see validation only; test is read by reports only.

    Raises ConfigError for splits that cannot be trained on.
    """

    name: str
    classes: int
    """Size of the last dimension of the logits: classes of an image, the vocabulary of a text."""
    build_host: Callable[[], Host]
    """Makes a fresh host; where it draws initial weights from torch's generator, every episode has its own."""
    train: Split | Dataset[Sample]
    """In memory, or a map-style dataset (x, y) of samples of equal shapes that workers read."""
    validation: Split
    test: Split
    description: str = ""
    learning_rate: float = 0.05
    batch_size: int = 64
    samples_per_epoch: int | None = None
    """Samples each env draws in one epoch; None: all of the training split."""
    n_envs: int = 8
    episode_length: int = 30
    rounds: int = 4
    """Rounds of a run whose controller does not learn."""
    learning_rounds: int = 25
    """Rounds of a run whose controller learns."""
    evaluation_batch: int = 500
    """Samples that are evaluated at once: features of many more leave the caches, and take twice as long."""
    workers: int = 2
    """Processes that read training data which is not in memory."""
    augmentation: Augmentation = Augmentation()
    """What is done to training images that lie in memory as bytes."""
    precision: Precision = "float32"
    """What passes compute with, see ``TaskConfig.precision``."""

    def __post_init__(self) -> None:
        for name, split in self._splits().items():
            split.check(f"{self.name}, {name} split", self.classes)
        if not isinstance(self.train, Split) and not len(self.train):  # type: ignore[arg-type]
            raise ConfigError(f"{self.name}, train split: it has no samples")
        self._check_augmentation()

    def _check_augmentation(self) -> None:
        if self.augmentation == Augmentation():
            return
        if not isinstance(self.train, Split) or self.train.table is None:
            raise ConfigError(f"{self.name}: augmentation needs uint8 training images with a table")
        side, crop = min(self.train.x.shape[1:3]), self.augmentation.crop
        if not 0 <= crop < side:
            raise ConfigError(f"{self.name}: crop is {crop}; for images of this size it must be 0 to {side - 1} pixels")

    def _splits(self) -> dict[str, Split]:
        """Those in memory, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in named.items() if isinstance(split, Split)}

    @property
    def samples(self) -> int:
        """Of the training split."""
        return len(self.train)  # type: ignore[arg-type]

    def calibration_inputs(self, count: int = 256) -> Tensor:
        """The first training inputs, at most ``count``, on the task's device."""
        count = min(count, self.samples)
        if isinstance(self.train, Split):
            return self.train.inputs(0, count)
        return torch.stack([self.train[row][0] for row in range(count)]).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the data lies, and hosts train."""
        return self.validation.x.device

    def to(self, device: torch.device) -> Task:
        """The same task with its splits on ``device``."""
        return replace(self, **{name: split.to(device) for name, split in self._splits().items()})  # type: ignore[arg-type]

    @property
    def sample(self) -> Tensor:
        """A few inputs that networks are tried on."""
        return self.validation.inputs(0, SAMPLE)


def resolve(config: TrainingConfig, task: Task) -> TrainingConfig:
    """The config with the task's numbers in place of None. Raises ConfigError for a batch that the data cannot fill."""
    chosen = config.task
    samples = chosen.samples_per_epoch or task.samples_per_epoch or task.samples
    batch = chosen.batch_size or task.batch_size
    if samples > task.samples:
        raise ConfigError(f"task.samples_per_epoch is {samples}, but {task.name} has {task.samples} training samples")
    if chosen.micro_batches > batch:
        raise ConfigError(f"task.micro_batches is {chosen.micro_batches}, more than the {batch} samples of a batch")
    if batch > samples:
        raise ConfigError(f"task.batch_size is {batch}, larger than the {samples} samples of an epoch of {task.name}")
    return config.with_values(
        task={
            "samples_per_epoch": samples,
            "batch_size": batch,
            "learning_rate": chosen.learning_rate or task.learning_rate,
            "precision": chosen.precision or task.precision,
        },
        env={
            "n_envs": config.env.n_envs or task.n_envs,
            "episode_length": config.env.episode_length or task.episode_length,
        },
        run={"rounds": config.run.rounds or (task.learning_rounds if config.run.learns else task.rounds)},
    )
