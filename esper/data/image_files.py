"""Reads torchvision's image data sets; all missing and corrupt files are reported in one message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.config import ConfigError
from esper.data.split import Split
from esper.data.task import DataOptions
from esper.hosts.torchvision_shim import import_torchvision

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
    """Returns torchvision's class for it, whose attributes are its files, checksums and address."""


def read_images(source: ImageSource, options: DataOptions) -> tuple[Split, Split]:
    """Returns the training and the test images, uint8 [N, side, side, C], in the order of the files.

    Raises ConfigError with every missing and corrupt file, the folder for them, and how to get them.
    """
    dataset, folder = source.dataset(), options.folder
    problems = _problems(source, dataset, folder)
    if problems and options.download:
        _download(source, dataset, folder)
        problems = _problems(source, dataset, folder)
    if problems:
        raise ConfigError(
            "\n".join(
                [
                    f"{source.title} cannot be read:",
                    *problems,
                    "Put the files there, or name another folder (--set task.data=FOLDER, or the environment variable "
                    f"ESPER_DATA); it is {folder} now.",
                    f"To fetch them: --set task.download=true, or by hand from {source.home}",
                ]
            )
        )
    return _read(source, dataset, folder, True), _read(source, dataset, folder, False)


def _problems(source: ImageSource, dataset: Dataset, folder: Path) -> list[str]:
    """Returns a line for each missing or corrupt file. Raises ConfigError if the folder cannot be read.

    CIFAR's files are pickles, and loading a pickle can run code: all checksums are compared before one is opened.
    """
    try:
        if not hasattr(dataset, "train_list"):
            return _idx_problems(source, dataset, folder)
        files = [*dataset.train_list, *dataset.test_list, (dataset.meta["filename"], dataset.meta["md5"])]
        lines = [_checksum_problem(folder / dataset.base_folder / name, md5) for name, md5 in files]
        return [line for line in lines if line is not None]
    except OSError as error:  # no permission to read or to unpack, or a full disk
        raise ConfigError(f"{source.title} in {folder} cannot be read: {error}") from None


def _checksum_problem(file: Path, md5: str) -> str | None:
    utils = import_torchvision("torchvision.datasets.utils")
    if not file.is_file():
        return f"  missing: {file}"
    if not utils.check_integrity(file, md5):
        return f"  corrupt: {file} (its md5 is {utils.calculate_md5(file)}, not {md5}); delete it"
    return None


def _idx_problems(source: ImageSource, dataset: Dataset, folder: Path) -> list[str]:
    """Checks IDX files: an archive (.gz) must have the right checksum and is unpacked; then the size must be right."""
    lines = []
    for archive, md5 in dataset.resources:
        packed = folder / dataset.__name__ / "raw" / archive
        file = packed.with_suffix("")
        if not file.is_file():
            if problem := _checksum_problem(packed, md5):
                lines.append(problem)
                continue
            import_torchvision("torchvision.datasets.utils").extract_archive(str(packed), str(packed.parent))
        count = source.train if archive.startswith("train") else source.test
        # A header of 16 bytes and one byte per pixel, or a header of 8 bytes and one byte per label.
        wanted = 16 + count * source.side**2 if "images" in archive else 8 + count
        size = file.stat().st_size
        if size != wanted:
            lines.append(f"  corrupt: {file} (it has {size} bytes, not {wanted}); delete it")
    return lines


def _download(source: ImageSource, dataset: Dataset, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        dataset(folder, download=True)
    except (OSError, RuntimeError, EOFError) as error:  # no network, a moved page, a full disk, a broken archive
        raise ConfigError(
            f"{source.title} could not be downloaded to {folder}: {error}\nGet it by hand from {source.home}"
        ) from None


def _read(source: ImageSource, dataset: Dataset, folder: Path, train: bool) -> Split:
    try:
        found = dataset(folder, train=train)
        pixels, labels = torch.as_tensor(found.data), torch.as_tensor(found.targets, dtype=torch.int64)
    except Exception as error:  # invalid files can raise anything
        raise ConfigError(f"{folder} cannot be read as {source.title}: {error}") from None
    if pixels.ndim == 3:  # gray images come without a channel
        pixels = pixels.unsqueeze(-1)
    count = source.train if train else source.test
    wanted = (count, source.side, source.side, source.channels)
    what = f"{source.title} in {folder}: the {'training' if train else 'test'} images"
    if tuple(pixels.shape) != wanted or pixels.dtype != torch.uint8:
        raise ConfigError(f"{what} are {pixels.dtype} {list(pixels.shape)}, not torch.uint8 {list(wanted)}")
    if len(labels) != count or int(labels.min()) < 0 or int(labels.max()) >= source.classes:
        raise ConfigError(f"{what} must have {count} labels from 0 to {source.classes - 1}")
    return Split(pixels.contiguous(), labels)
