"""Sources of data that hosts of an exam differ in, by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from esper.config import ConfigError
from esper.core.arrays import Floats, Ints
from esper.data import digits
from esper.data.split import Split
from esper.data.task import DataOptions
from esper.data.tasks import load_task
from esper.exam.made import made_images, made_table

MADE = 300
"""Number of made tables, and of made sets of images."""
FOLDER = "tables"
"""Folder in that of the data, with a file ``NAME.npz`` of x float [N, D] and y int [N] for each table."""
MOST_ROWS = 8_000
MADE_KINDS = {"made_table": made_table, "made_images": made_images}
IMAGE_TASKS = ("digits", "mnist5k", "fashion_mnist")
IMAGES = ("digits", "digits_permuted", "digits_parity", "mnist5k", "mnist5k_noisy")
HELD_OUT_IMAGES = ("fashion_mnist", "fashion_mnist_permuted")
TABLES = ("letter", "satellite", "vehicle", "pima", "ionosphere", "income")
HELD_OUT_TABLES = ("breast_cancer", "dna", "spam", "vowel", "shuttle", "musk", "soybean")


@dataclass(frozen=True)
class Source:
    """Samples with their classes, in a fixed random order."""

    name: str
    x: Floats
    """Rows [N, D] of a table, or grey images [N, 8, 8]."""
    y: Ints
    """Classes from 0, [N]."""

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    @property
    def images(self) -> bool:
        return self.x.ndim == 3


def made_names(images: bool) -> list[str]:
    """Returns the names of made sources."""
    kind = "images" if images else "table"
    return [f"made_{kind}_{number}" for number in range(MADE)]


@cache
def load_source(name: str) -> Source:
    """Loads a source. Raises ConfigError for an unknown name, or for data that is missing."""
    x, y = _read(name)
    _, y = np.unique(y, return_inverse=True)
    order = np.random.default_rng(0).permutation(len(y))[:MOST_ROWS]
    return Source(
        name,
        np.asarray(x[order], dtype=np.float64),
        y[order].astype(np.int64),
    )


def _read(name: str) -> tuple[Floats, Ints]:
    kind, _, number = name.rpartition("_")
    if kind in MADE_KINDS and number.isdecimal():
        return MADE_KINDS[kind](int(number))
    if name == "breast_cancer":
        from sklearn.datasets import load_breast_cancer

        return load_breast_cancer(return_X_y=True)  # type: ignore[no-any-return]
    if name in (*IMAGES, *HELD_OUT_IMAGES):
        task = next(task for task in IMAGE_TASKS if name.startswith(task))
        return _changed(*_small_images(task), name.removeprefix(task))
    if name in (*TABLES, *HELD_OUT_TABLES):
        file = Path(DataOptions().folder, FOLDER, f"{name}.npz")
        if not file.is_file():
            raise ConfigError(f"the table {name!r} is not there: {file}; benchmarks/uci_tables.py makes it")
        with np.load(file) as arrays:
            return arrays["x"], arrays["y"]
    made = [f"{kind}_NUMBER" for kind in MADE_KINDS]
    known = [*IMAGES, *HELD_OUT_IMAGES, *TABLES, *HELD_OUT_TABLES, *made]
    raise ConfigError(f"unknown source {name!r}; known: {', '.join(known)}")


@cache
def _small_images(name: str) -> tuple[Floats, Ints]:
    """Returns the images of a task at 8×8 pixels, all splits together."""
    task = digits.load() if name == "digits" else load_task(name)
    images = []
    labels = []
    for split in (task.train, task.validation, task.test):
        assert isinstance(split, Split)
        images.append(split.inputs(0, len(split)).double().numpy()[:, 0])
        labels.append(split.y.numpy())
    x = np.concatenate(images)
    if x.shape[1] == 28:
        padded = np.pad(x, ((0, 0), (2, 2), (2, 2)), constant_values=x.min())
        x = padded.reshape(-1, 8, 4, 8, 4).mean(axis=(2, 4))
    return x, np.concatenate(labels)


def _changed(
    x: Floats,
    y: Ints,
    change: str,
) -> tuple[Floats, Ints]:
    rng = np.random.default_rng(1)
    if change == "_permuted":
        order = rng.permutation(x[0].size)
        x = x.reshape(len(x), -1)[:, order].reshape(x.shape)
    elif change == "_noisy":
        x = x / x.std() + rng.normal(size=x.shape) * 0.7
    elif change == "_parity":
        y = y % 2
    return x, y
