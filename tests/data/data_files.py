"""Small data sets in the file formats of their authors."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.data.images import CIFAR10, FASHION_MNIST, ImageSource
from esper.hosts.zoo import import_torchvision

TRAIN, HELD_OUT, VALIDATION, TEST = 50, 10, 5, 8
"""Images of the small data sets."""


def pixels(count: int, *shape: int, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [count, *shape]; its first two pixels are the number of an image and the seed."""
    x = np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)
    flat = x.reshape(count, -1)
    flat[:, 0], flat[:, 1] = np.arange(count), seed
    return x


def md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes()).hexdigest()


def small(source: ImageSource, dataset: Any) -> ImageSource:
    return replace(
        source,
        train=TRAIN,
        held_out=HELD_OUT,
        validation=VALIDATION,
        test=TEST,
        dataset=lambda: dataset,
    )


def write_cifar10(folder: Path) -> ImageSource:
    """Five training batches and a test batch of 10 labels, as in the unpacked archive."""
    x, y = pixels(TRAIN, 3072), np.arange(TRAIN) % 10
    size = TRAIN // 5
    files: dict[str, Any] = {
        f"data_batch_{i + 1}": {
            "data": x[i * size : (i + 1) * size],
            "labels": y[i * size : (i + 1) * size].tolist(),
            "batch_label": f"training batch {i + 1} of 5",
        }
        for i in range(5)
    }
    files["test_batch"] = {
        "data": pixels(TEST, 3072, seed=1),
        "labels": [i % 10 for i in range(TEST)],
    }
    files["batches.meta"] = {"label_names": [f"class {i}" for i in range(10)]}
    _pickle(folder / "cifar-10-batches-py", files)
    return cifar10_as_it_lies(folder)


def cifar10_as_it_lies(folder: Path) -> ImageSource:
    """The source with the checksums that the files in ``folder`` have now."""
    cifar = import_torchvision("torchvision.datasets").CIFAR10

    def sums(files: list[list[str]]) -> list[tuple[str, str]]:
        return [(name, md5(folder / cifar.base_folder / name)) for name, _ in files]

    meta = {**cifar.meta, "md5": md5(folder / cifar.base_folder / "batches.meta")}
    lists = {
        "train_list": sums(cifar.train_list),
        "test_list": sums(cifar.test_list),
        "meta": meta,
    }
    return small(CIFAR10, type("CIFAR10", (cifar,), lists))


def write_fashion_mnist(folder: Path, unpacked: bool = False) -> ImageSource:
    """Four idx files, packed by gzip as they are shipped, or unpacked."""
    mnist = import_torchvision("torchvision.datasets").FashionMNIST
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    resources = []
    for part, count, seed in (("train", TRAIN, 0), ("t10k", TEST, 1)):
        x, y = (
            pixels(count, 28, 28, seed=seed),
            (np.arange(count) % 10).astype(np.uint8),
        )
        for name, content in (
            (
                f"{part}-images-idx3-ubyte",
                struct.pack(">IIII", 0x803, count, 28, 28) + x.tobytes(),
            ),
            (
                f"{part}-labels-idx1-ubyte",
                struct.pack(">II", 0x801, count) + y.tobytes(),
            ),
        ):
            packed = gzip.compress(content)
            resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
            if unpacked:
                (raw / name).write_bytes(content)
            else:
                (raw / f"{name}.gz").write_bytes(packed)
    # torchvision names the folder after the class.
    here = type("FashionMNIST", (mnist,), {"resources": resources})
    return small(FASHION_MNIST, here)


def _pickle(folder: Path, files: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
