"""1,797 handwritten digits of 8×8 pixels, which ship with scikit-learn: images in `digits`, rows in `digits_table`."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from esper.config import ConfigError
from esper.data.split import Split
from esper.data.task import Task
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.sizes import HostFamily

DESCRIPTION = "8x8 handwritten digits, embedded (997 / 400 / 400); CNN of 277 parameters"
TABLE = "the digits of `digits` as a table of 64 numbers (997 / 400 / 400); MLP of 682 parameters"
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


def mlp_of_widths(first: int, second: int) -> GraftedHost:
    """Makes an MLP with two hidden layers, and a slot after each (row 0); those of row 2 have more hidden units."""
    network = nn.Sequential(
        nn.Linear(64, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, 10),
    )
    sites = {
        "r0c0": "1",
        "r0c1": "3",
        "r2c0": "0 -> 2",
        "r2c1": "2 -> 4",
    }
    host = graft(network, sites, topology="mlp")
    host.use_slots(["r0"])
    return host


build_mlp = HostFamily(lambda width: mlp_of_widths(width, width), width=8)


def load_table() -> Task:
    """Loads the task `digits_table`: the splits of `digits` as rows of 64 numbers."""
    images = load()
    splits: dict[str, Any] = {}
    for name in ("train", "validation", "test"):
        split = getattr(images, name)
        splits[name] = Split(split.x.flatten(1), split.y)
    return replace(
        images,
        name="digits_table",
        description=TABLE,
        build_host=build_mlp,
        optimizer="adamw",  # compared with SGD for the host alone (benchmarks/results/host_training.md)
        learning_rate=0.03,
        weight_decay=0.01,
        **splits,
    )
