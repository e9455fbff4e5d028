"""Reads torchvision's image data sets; all missing and corrupt files are reported in one message."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.config import ConfigError
from esper.data.split import Split
from esper.data.task import DataOptions
from esper.hosts.torchvision_shim import import_torchvision

SYSTEM = {"FashionMNIST": Path("/usr/share/datasets/fashion-mnist")}
"""Folders of packages of the system, here Debian's dataset-fashion-mnist, by torchvision's class."""
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
    dataset = source.dataset()
    folder = options.folder
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
        classes = (dataset.meta["filename"], dataset.meta["md5"])
        files = [*dataset.train_list, *dataset.test_list, classes]
        lines = [_checksum_problem(folder / dataset.base_folder / name, md5) for name, md5 in files]
        return list(filter(None, lines))
    except OSError as error:  # no permission to read or to unpack, or a full disk
        raise ConfigError(f"{source.title} in {folder} cannot be read: {error}") from None


def _checksum_problem(file: Path, md5: str) -> str | None:
    utils = import_torchvision("torchvision.datasets.utils")
    if not file.is_file():
        return f"  missing: {file}"
    if utils.check_integrity(file, md5):
        return None
    return f"  corrupt: {file} (its md5 is {utils.calculate_md5(file)}, not {md5}); put a copy of the original there"


def _idx_problems(source: ImageSource, dataset: Dataset, folder: Path) -> list[str]:
    """Checks IDX files by their content, and unpacks archives (.gz), which may be compressed in any way.

    An archive is also taken from where a package of the system puts it.
    """
    lines = []
    for archive, _md5 in dataset.resources:
        file = (folder / dataset.__name__ / "raw" / archive).with_suffix("")
        packed = file.with_name(archive)
        of_system = SYSTEM.get(dataset.__name__, file.parent) / archive
        present = next(filter(Path.is_file, (file, packed, of_system)), None)
        if present is None:
            lines.append(f"  missing: {packed}")
            continue
        content = _unpacked(present)
        sizes = [source.train if archive.startswith("train") else source.test]
        if "images" in archive:
            sizes += [source.side, source.side]
        problem = _content_problem(content, sizes)
        if problem is not None:
            lines.append(f"  corrupt: {present} ({problem}); put a copy of the original there")
        elif present != file:
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            part.write_bytes(content)
            part.replace(file)  # so that a full disk leaves no half of a file
    return lines


def _unpacked(file: Path) -> bytes:
    """Returns the content of a file, unpacked if it is an archive; nothing of an archive that is damaged."""
    content = file.read_bytes()
    if file.suffix != ".gz":
        return content
    unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # with the header of gzip
    try:
        unpacked = unpacking.decompress(content)
    except zlib.error:
        return b""
    if not unpacking.eof:
        return b""
    return unpacked


def _content_problem(content: bytes, sizes: list[int]) -> str | None:
    """Returns the fault of an IDX file of bytes in an array of these ``sizes``; None if there is none."""
    # Two zeros, the type (8: bytes), the number of dimensions, and each size as a big-endian int of 32 bits.
    header = bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)
    wanted = len(header) + math.prod(sizes)
    if len(content) != wanted:
        return f"it has {len(content)} bytes of content, not {wanted}"
    if not content.startswith(header):
        return f"it does not begin as a file of {' × '.join(map(str, sizes))} bytes"
    return None


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
        images = dataset(folder, train=train)
        pixels = torch.as_tensor(images.data)
        labels = torch.as_tensor(images.targets, dtype=torch.int64)
    except Exception as error:  # invalid files can raise anything
        raise ConfigError(f"{folder} cannot be read as {source.title}: {error}") from None
    if pixels.ndim == 3:  # gray images come without a channel
        pixels = pixels.unsqueeze(-1)
    count = source.train if train else source.test
    wanted = (count, source.side, source.side, source.channels)
    part = "training" if train else "test"
    what = f"{source.title} in {folder}: the {part} images"
    if tuple(pixels.shape) != wanted or pixels.dtype != torch.uint8:
        raise ConfigError(f"{what} are {pixels.dtype} {list(pixels.shape)}, not torch.uint8 {list(wanted)}")
    if len(labels) != count or int(labels.min()) < 0 or int(labels.max()) >= source.classes:
        raise ConfigError(f"{what} must have {count} labels from 0 to {source.classes - 1}")
    return Split(pixels.contiguous(), labels)
