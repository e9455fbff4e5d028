"""`digits`: 1,797 handwritten digits of 8×8 pixels, which ship with scikit-learn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from esper.config import ConfigError
from esper.data.split import Split
from esper.data.task import Task
from esper.hosts.cnn import CNNHost

DESCRIPTION = "8x8 handwritten digits, embedded (997 / 400 / 400); CNN of 277 parameters"
SPLIT_SEED = 20_000
TRAIN = 997
VALIDATION = 400
TEST = 400


def build_host() -> CNNHost:
    """Makes a deliberately small host (277 parameters), so that growth can pay."""
    return CNNHost(
        in_channels=1,
        classes=10,
        base=3,
        blocks=2,
        kernel=3,
        pool_last=False,
        rows=2,
    )


def _file() -> Path:
    """Finds the table in scikit-learn, whose import would take a second and 80 MB of every process.

    Raises ConfigError if this version of scikit-learn keeps it elsewhere.
    """
    spec = find_spec("sklearn")
    if spec is not None:
        for folder in spec.submodule_search_locations or []:
            file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
            if file.is_file():
                return file
    raise ConfigError("the digits are read from scikit-learn, which has no datasets/data/digits.csv.gz here")


def load() -> Task:
    """Loads the task with a fixed random split into 997 training, 400 validation and 400 test images."""
    rows = np.loadtxt(_file(), delimiter=",")  # [1797, 65]: 64 pixels and the label
    rows = rows[np.random.default_rng(SPLIT_SEED).permutation(len(rows))]
    pixels = torch.tensor(rows[:, :-1], dtype=torch.float32).view(-1, 1, 8, 8)  # values 0 to 16
    labels = torch.tensor(rows[:, -1], dtype=torch.int64)
    # Normalised with the statistics of the training images, so that no information leaks from the other splits.
    mean = pixels[:TRAIN].mean()
    std = pixels[:TRAIN].std()
    sizes = [TRAIN, VALIDATION, TEST]
    x = torch.split((pixels - mean) / std, sizes)
    y = torch.split(labels, sizes)
    return Task(
        name="digits",
        description=DESCRIPTION,
        classes=10,
        build_host=build_host,
        train=Split(x[0], y[0]),
        validation=Split(x[1], y[1]),
        test=Split(x[2], y[2]),
        learning_rate=0.4,  # searched with the host alone (benchmarks/results/host_training.md)
        warmup_epochs=3.0,
        weight_decay=0.0,
        label_smoothing=0.1,
        batch_size=64,
        samples_per_epoch=TRAIN,
        n_envs=8,
        episode_length=30,
        slots=("all",),
        at_once=True,
    )
