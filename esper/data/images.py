"""Image tasks: presets for CIFAR-10 with six hosts, CIFAR-100 and Fashion-MNIST."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.data.image_files import ImageSource, read_images
from esper.data.split import Split
from esper.data.task import Augmentation, DataOptions, Task
from esper.hosts.cnn import CNNHost
from esper.hosts.host import Host
from esper.hosts.torchvision_shim import import_torchvision
from esper.hosts.zoo import torchvision_host
from esper.ops.stage_batch import normalisation_table

SPLIT_SEED = 20_001

CIFAR10 = ImageSource(
    title="CIFAR-10",
    channels=3,
    classes=10,
    side=32,
    train=50_000,
    held_out=5_000,
    validation=2_500,
    test=10_000,
    home="https://www.cs.toronto.edu/~kriz/cifar.html",
    dataset=lambda: import_torchvision("torchvision.datasets").CIFAR10,
)
CIFAR100 = replace(
    CIFAR10,
    title="CIFAR-100",
    classes=100,
    dataset=lambda: import_torchvision("torchvision.datasets").CIFAR100,
)
FASHION_MNIST = replace(
    CIFAR10,
    title="Fashion-MNIST",
    channels=1,
    side=28,
    train=60_000,
    home="https://github.com/zalandoresearch/fashion-mnist",
    dataset=lambda: import_torchvision("torchvision.datasets").FashionMNIST,
)


@dataclass(frozen=True)
class ImagePreset:
    """An image task: a data set and a host for it."""

    name: str
    source: ImageSource
    parameters: int
    """Number of parameters of the host without seeds."""
    build_host: Callable[[], Host]
    kind: str = "CNN"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the task in place of those that most presets have."""

    @property
    def description(self) -> str:
        source = self.source
        sizes = f"{source.train - source.held_out:,} / {source.held_out:,} / {source.test:,}"
        return f"{source.title} ({sizes}), from a local folder; {self.kind} of {self.parameters:,} parameters"

    def load(self, options: DataOptions) -> Task:
        """Loads the task. Raises ConfigError if its data is missing or corrupt."""
        train, validation, test = read_splits(self.source, options)
        usual = Task(
            name=self.name,
            description=self.description,
            classes=self.source.classes,
            build_host=self.build_host,
            train=train,
            validation=validation,
            test=test,
            learning_rate=0.05,
            batch_size=128,
            samples_per_epoch=len(train),
            n_envs=8,
            episode_length=75,
            augmentation=Augmentation(crop=4, flip=True),
            precision="auto",
        )
        return replace(usual, **self.settings)


def cnn(
    source: ImageSource,
    base: int,
    blocks: int = 3,
    kernel: int = 3,
    pool: bool = True,
) -> Callable[[], Host]:
    """Returns a factory of convolutional hosts; without pools there is one row of slots."""
    return partial(
        CNNHost,
        source.channels,
        source.classes,
        base=base,
        blocks=blocks,
        kernel=kernel,
        pool=pool,
        rows=2 if pool else 1,
    )


SHORT: Mapping[str, Any] = MappingProxyType(
    {
        "batch_size": 64,
        "samples_per_epoch": 5_000,
        "n_envs": 4,
        "episode_length": 16,
        "slots": ("all",),
        "at_once": True,
        "augmentation": Augmentation(crop=2, flip=True),
        "optimizer": "adamw",
        "learning_rate": 0.1,  # benchmarks/results/host_training.md
        "warmup_epochs": 1.6,
        "weight_decay": 0.0,
        "label_smoothing": 0.1,
    }
)
"""Sizes for a run on a few cores, and the settings that suit them."""

PRESETS = (
    ImagePreset("cifar10", CIFAR10, 6_418, cnn(CIFAR10, base=8)),
    ImagePreset("cifar10_scale", CIFAR10, 99_922, cnn(CIFAR10, base=8, blocks=5)),
    ImagePreset("cifar10_impaired", CIFAR10, 77, cnn(CIFAR10, base=1, kernel=1)),
    ImagePreset("cifar10_minimal", CIFAR10, 164, cnn(CIFAR10, base=2, kernel=1, pool=False)),
    ImagePreset("cifar10_wide", CIFAR10, 94_762, cnn(CIFAR10, base=32)),
    ImagePreset(
        "resnet18_cifar10",
        CIFAR10,
        11_173_962,
        partial(torchvision_host, "resnet18", CIFAR10.classes, small_images=True),
        kind="torchvision's ResNet-18",
    ),
    ImagePreset("cifar100", CIFAR100, 30_196, cnn(CIFAR100, base=16)),
    ImagePreset("fashion_mnist", FASHION_MNIST, 6_274, cnn(FASHION_MNIST, base=8), settings=SHORT),
)


def read_splits(source: ImageSource, options: DataOptions) -> tuple[Split, Split, Split]:
    """Returns the training, validation and test split, stored as bytes.

    Their table normalises each channel with the statistics of the training images. The random split is always the
    same; validation is a fixed part of the images that are held out from training.
    """
    images, test = read_images(source, options)
    order = torch.from_numpy(np.random.default_rng(SPLIT_SEED).permutation(source.train))
    first = source.train - source.held_out
    training = order[:first]
    validation = order[first : first + source.validation]
    x = images.x[training]
    means, stds = mean_and_std(x)
    table = normalisation_table(means, stds)
    return (
        Split(x, images.y[training], table),
        Split(images.x[validation], images.y[validation], table),
        replace(test, table=table),
    )


def mean_and_std(x: Tensor) -> tuple[list[float], list[float]]:
    """Returns the mean and std of each channel of images uint8 [N, H, W, C], divided by 255, from a histogram."""
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in x.unbind(-1)])  # [C, 256]
    shares = counts / counts.sum(dim=1, keepdim=True).double()
    means = (shares * values).sum(dim=1)
    variances = (shares * (values - means[:, None]) ** 2).sum(dim=1)
    return means.tolist(), variances.sqrt().tolist()
