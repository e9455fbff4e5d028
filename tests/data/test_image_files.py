"""Image data sets read from small files in the real formats; missing and corrupt files, and downloads."""

from __future__ import annotations

import gzip
import pickle
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.config import ConfigError
from esper.data import image_files
from esper.data.image_files import ImageSource, read_images
from esper.data.task import DataOptions
from tests.data.data_files import (
    TEST,
    TRAIN,
    cifar10_as_it_lies,
    md5,
    pixels,
    write_cifar10,
    write_fashion_mnist,
)


def planes(x: torch.Tensor) -> np.ndarray:
    """Images [N, H, W, C] with their channels first."""
    return x.permute(0, 3, 1, 2).numpy()


def test_images_stand_upright_with_their_labels(tmp_path: Path) -> None:
    """CIFAR stores all red rows of an image, then green, then blue."""
    train, test = read_images(write_cifar10(tmp_path), DataOptions(tmp_path))
    np.testing.assert_array_equal(
        planes(train.x), pixels(TRAIN, 3072).reshape(-1, 3, 32, 32)
    )
    np.testing.assert_array_equal(
        planes(test.x), pixels(TEST, 3072, seed=1).reshape(-1, 3, 32, 32)
    )
    assert train.y.tolist() == [i % 10 for i in range(TRAIN)]


def test_a_folder_that_may_not_be_read_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_cifar10(tmp_path)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "data_batch_1")

    monkeypatch.setattr("torchvision.datasets.utils.check_integrity", denied)
    assert "Permission denied: 'data_batch_1'" in refused(source, tmp_path)


def refused(source: ImageSource, folder: Path, download: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        read_images(source, DataOptions(folder, download))
    return str(caught.value)


def test_every_missing_and_every_corrupt_file_is_named(tmp_path: Path) -> None:
    source = write_cifar10(tmp_path)
    base = tmp_path / "cifar-10-batches-py"
    (base / "data_batch_2").unlink()
    (base / "test_batch").write_bytes((base / "test_batch").read_bytes()[:-1])
    text = refused(source, tmp_path)
    assert f"missing: {base / 'data_batch_2'}" in text
    assert f"corrupt: {base / 'test_batch'} (its md5 is" in text
    assert "data_batch_1" not in text


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.target,)


def test_a_pickle_with_another_checksum_is_never_opened(tmp_path: Path) -> None:
    source = write_cifar10(tmp_path)
    target = tmp_path / "executed"
    (tmp_path / "cifar-10-batches-py" / "batches.meta").write_bytes(
        pickle.dumps(Bomb(target))
    )
    assert "batches.meta (its md5 is" in refused(source, tmp_path)
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
    assert f"{tmp_path} cannot be read as CIFAR-10" in refused(
        cifar10_as_it_lies(tmp_path), tmp_path
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"train": 49}, "training images"), ({"test": 9}, "test images")],
)
def test_another_number_of_images_is_refused(
    sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    text = refused(replace(write_cifar10(tmp_path), **sizes), tmp_path)  # type: ignore[arg-type]
    assert message in text
    assert "not torch.uint8 [" in text


def test_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    assert "labels from 0 to 8" in refused(
        replace(write_cifar10(tmp_path), classes=9), tmp_path
    )


def test_idx_files_are_read_packed_and_unpacked(tmp_path: Path) -> None:
    packed = read_images(
        write_fashion_mnist(tmp_path / "a"), DataOptions(tmp_path / "a")
    )
    unpacked = read_images(
        write_fashion_mnist(tmp_path / "b", unpacked=True), DataOptions(tmp_path / "b")
    )
    for a, b in zip(packed, unpacked, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
    np.testing.assert_array_equal(packed[0].x[..., 0].numpy(), pixels(TRAIN, 28, 28))


@pytest.mark.parametrize("unpacked", [False, True])
def test_a_corrupt_idx_file_is_named(unpacked: bool, tmp_path: Path) -> None:
    source = write_fashion_mnist(tmp_path, unpacked)
    file = (
        tmp_path
        / "FashionMNIST"
        / "raw"
        / f"train-images-idx3-ubyte{'' if unpacked else '.gz'}"
    )
    file.write_bytes(file.read_bytes()[:-1])
    assert f"corrupt: {file}" in refused(source, tmp_path)


def test_an_idx_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """The right number of bytes with an invalid header."""
    source = write_fashion_mnist(tmp_path, unpacked=True)
    file = tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert f"corrupt: {file} (it does not begin as" in refused(source, tmp_path)
    assert "delete" not in refused(source, tmp_path)


def test_an_archive_with_another_compression_is_read_by_its_content(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    source, other = write_fashion_mnist(one), write_fashion_mnist(two)
    for archive in (one / "FashionMNIST" / "raw").iterdir():
        archive.write_bytes(
            gzip.compress(gzip.decompress(archive.read_bytes()), compresslevel=1)
        )
    for a, b in zip(
        read_images(source, DataOptions(one)),
        read_images(other, DataOptions(two)),
        strict=True,
    ):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)


def test_archives_of_a_package_of_the_system_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_fashion_mnist(tmp_path / "system")
    monkeypatch.setattr(
        image_files,
        "SYSTEM",
        {"FashionMNIST": tmp_path / "system" / "FashionMNIST" / "raw"},
    )
    train, _ = read_images(source, DataOptions(tmp_path / "mine"))
    np.testing.assert_array_equal(train.x[..., 0].numpy(), pixels(TRAIN, 28, 28))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a local server of the files in ``tmp_path``."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def from_there(source: ImageSource, address: str) -> ImageSource:
    """The source with the address of its files."""
    dataset = source.dataset()
    return replace(
        source,
        dataset=lambda: type(dataset.__name__, (dataset,), {"mirrors": [address]}),
    )


def test_missing_files_are_downloaded_on_request(address: str, tmp_path: Path) -> None:
    source = from_there(
        write_fashion_mnist(tmp_path / "there"), f"{address}there/FashionMNIST/raw/"
    )
    assert "missing" in refused(source, tmp_path / "here")
    train, _ = read_images(source, DataOptions(tmp_path / "here", download=True))
    np.testing.assert_array_equal(train.x[..., 0].numpy(), pixels(TRAIN, 28, 28))


def test_a_download_that_fails_says_so(address: str, tmp_path: Path) -> None:
    source = from_there(write_fashion_mnist(tmp_path / "there"), f"{address}gone/")
    text = refused(source, tmp_path / "here", download=True)
    assert "could not be downloaded" in text
    assert "404" in text
    assert source.home in text


def test_an_archive_is_downloaded_checked_and_unpacked(
    address: str, tmp_path: Path
) -> None:
    source = write_cifar10(tmp_path / "there")
    with tarfile.open(tmp_path / "small.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "there" / "cifar-10-batches-py", "cifar-10-batches-py")
    where = {
        "url": f"{address}small.tar.gz",
        "filename": "small.tar.gz",
        "tgz_md5": md5(tmp_path / "small.tar.gz"),
    }
    here = replace(source, dataset=lambda: type("CIFAR10", (source.dataset(),), where))
    train, _ = read_images(here, DataOptions(tmp_path / "here", download=True))
    np.testing.assert_array_equal(
        planes(train.x), pixels(TRAIN, 3072).reshape(-1, 3, 32, 32)
    )
    spoiled = replace(
        source,
        dataset=lambda: type(
            "CIFAR10", (source.dataset(),), {**where, "tgz_md5": "0" * 32}
        ),
    )
    assert "could not be downloaded" in refused(
        spoiled, tmp_path / "elsewhere", download=True
    )
