"""Image tasks, read from small files in the real formats, and the messages for missing and corrupt files."""

from __future__ import annotations

import pickle
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.config import ConfigError, TrainingConfig
from esper.data.image_files import ImageSource, read_images
from esper.data.images import CIFAR10, PRESETS, ImagePreset, read_splits
from esper.data.split import Split
from esper.data.task import DataOptions, resolve
from esper.data.tasks import TASKS, build_host, load_task
from esper.env.vector_env import GrowthVectorEnv
from tests.core_helpers import wait_actions
from tests.data.data_files import (
    HELD_OUT,
    TEST,
    TRAIN,
    VALIDATION,
    cifar10_as_it_lies,
    md5,
    pixels,
    write_cifar10,
    write_cifar100,
    write_fashion_mnist,
)

WRITERS: dict[str, Callable[[Path], ImageSource]] = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "fashion_mnist": write_fashion_mnist,
}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_the_hosts_of_presets_have_their_parameters(preset: ImagePreset) -> None:
    host = preset.build_host()
    assert host.parameter_count == preset.parameters
    source = preset.source
    x = torch.zeros(2, source.channels, source.side, source.side)
    assert host(x).shape == (2, source.classes)
    assert f"{preset.parameters:,}" in TASKS[preset.name].description


def test_the_counts_of_the_presets() -> None:
    wanted = {
        "cifar10": 6_418,
        "cifar10_scale": 99_922,
        "cifar10_impaired": 77,
        "cifar10_minimal": 164,
        "cifar10_wide": 94_762,
    }
    assert {name: build_host(name).parameter_count for name in wanted} == wanted


def test_the_sizes_of_cifar10() -> None:
    assert (CIFAR10.train - CIFAR10.held_out, CIFAR10.held_out, CIFAR10.validation, CIFAR10.test) == (
        45_000,
        5_000,
        2_500,
        10_000,
    )


def seen(split: Split) -> torch.Tensor:
    """All inputs of a split as networks see them."""
    return split.inputs(0, len(split))


def planes(x: torch.Tensor) -> np.ndarray:
    """Images [N, H, W, C] with their channels first."""
    return x.permute(0, 3, 1, 2).numpy()


@pytest.mark.parametrize("kind", WRITERS)
def test_a_data_set_is_read_and_normalised(kind: str, tmp_path: Path) -> None:
    source = WRITERS[kind](tmp_path)
    train, validation, test = read_splits(source, DataOptions(tmp_path))
    assert [len(train), len(validation), len(test)] == [TRAIN - HELD_OUT, VALIDATION, TEST]
    for split in (train, validation, test):
        assert split.x.dtype == torch.uint8
        assert split.x.shape[1:] == (source.side, source.side, source.channels)
        assert seen(split).shape[1:] == (source.channels, source.side, source.side)
        assert split.y.dtype == torch.int64
        assert split.y.shape == (len(split.x),)
    for channel in seen(train).unbind(1):
        assert float(channel.mean()) == pytest.approx(0, abs=1e-4)
        assert float(channel.std()) == pytest.approx(1, abs=1e-4)
    # Test pixels by the statistics of training images: value = (pixel − mean) / std, and images keep their order.
    raw, _ = read_images(source, DataOptions(tmp_path))
    _, raw_test = read_images(source, DataOptions(tmp_path))
    first, now = raw_test.x[..., 0].double(), seen(test)[:, 0].double()
    slope = (now.max() - now.min()) / (first.max() - first.min())
    torch.testing.assert_close(now, (first - first.min()) * slope + now.min(), rtol=1e-4, atol=1e-4)
    assert test.y.tolist() == [i % source.classes for i in range(TEST)]
    assert raw.x.dtype == torch.uint8


def test_images_stand_upright_with_their_labels(tmp_path: Path) -> None:
    """CIFAR stores all red rows of an image, then green, then blue."""
    train, test = read_images(write_cifar10(tmp_path), DataOptions(tmp_path))
    np.testing.assert_array_equal(planes(train.x), pixels(TRAIN, 3072).reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(planes(test.x), pixels(TEST, 3072, seed=1).reshape(-1, 3, 32, 32))
    assert train.y.tolist() == [i % 10 for i in range(TRAIN)]


@pytest.mark.trap(24)
@pytest.mark.parametrize("kind", WRITERS)
def test_the_splits_are_disjoint(kind: str, tmp_path: Path) -> None:
    source = WRITERS[kind](tmp_path)
    everything = replace(source, validation=HELD_OUT)
    images, _ = read_images(source, DataOptions(tmp_path))
    train, validation, _ = read_splits(everything, DataOptions(tmp_path))
    # The first pixel spells the number of the image, so that split and number are known from the normalised value.
    values = torch.cat([seen(train)[:, 0, 0, 0], seen(validation)[:, 0, 0, 0]])
    assert torch.unique(values).numel() == TRAIN
    numbers = torch.argsort(torch.argsort(values))
    assert sorted(numbers.tolist()) == list(range(TRAIN))
    labels = torch.cat([train.y, validation.y])
    assert labels.tolist() == images.y[numbers].tolist()
    # The part that is validated on is the beginning of what is held out.
    _, part, _ = read_splits(source, DataOptions(tmp_path))
    assert torch.equal(part.y, validation.y[:VALIDATION])


def test_the_split_is_random_and_always_the_same(tmp_path: Path) -> None:
    source = write_cifar10(tmp_path)
    first, second = (read_splits(source, DataOptions(tmp_path)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
    held_out = first[1].x[:, 0, 0, 0]
    assert float(held_out.min()) < float(first[0].x[:, 0, 0, 0].median()) < float(held_out.max())


def test_a_preset_makes_a_task_of_it(tmp_path: Path) -> None:
    preset = replace(PRESETS[0], source=write_cifar10(tmp_path))
    task = preset.load(DataOptions(tmp_path))
    assert (task.name, task.classes, task.samples_per_epoch, task.batch_size) == ("cifar10", 10, 40, 128)
    assert (task.n_envs, task.episode_length, task.learning_rate) == (8, 75, 0.05)
    assert task.build_host()(task.train.inputs(0, 2)).shape == (2, 10)


def test_hosts_train_and_validate_on_it_all_on_the_same_images(tmp_path: Path) -> None:
    task = replace(PRESETS[0], source=write_cifar10(tmp_path)).load(DataOptions(tmp_path))
    config = TrainingConfig.parse(
        {
            "run": {"lanes": 1},
            "task": {"batch_size": 20},
            "env": {"n_envs": 3, "episode_length": 2, "baseline_episodes": 1},
        }
    )
    with closing(GrowthVectorEnv(task, resolve(config, task))) as env:
        env.reset(seed=0)
        env.step(wait_actions(3))
        for training in env.training:
            assert training.task.validation is task.validation
            assert training.host_parameters == 6_418
        assert all(0 <= accuracy <= 100 for accuracy in env.test_accuracy())


@pytest.mark.trap(12)
def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    task = replace(PRESETS[0], source=write_cifar10(tmp_path)).load(DataOptions(tmp_path))
    with pytest.raises(ConfigError, match="batch_size is 128, larger than the 40 samples"):
        resolve(TrainingConfig(), task)


def test_a_folder_that_may_not_be_read_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_cifar10(tmp_path)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "data_batch_1")

    monkeypatch.setattr("torchvision.datasets.utils.check_integrity", denied)
    assert "Permission denied: 'data_batch_1'" in refused(source, tmp_path)


def refused(source: ImageSource, folder: Path, download: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        read_images(source, DataOptions(folder, download))
    return str(caught.value)


@pytest.mark.parametrize("name", [preset.name for preset in PRESETS])
def test_missing_data_is_one_message_with_instructions(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task(name, DataOptions(tmp_path / "nowhere"))
    text = str(caught.value)
    assert str(tmp_path / "nowhere") in text
    assert "missing: " in text
    assert "--set task.download=true" in text
    assert "https://" in text
    assert "ESPER_DATA" in text
    assert not (tmp_path / "nowhere").exists()


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
    (tmp_path / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps(Bomb(target)))
    assert "batches.meta (its md5 is" in refused(source, tmp_path)
    assert not target.exists()
    pickle.loads(pickle.dumps(Bomb(target)))  # it would have
    assert target.exists()


@pytest.mark.parametrize("content", [b"no pickle", pickle.dumps({"labels": [1]}), pickle.dumps([1, 2])])
def test_a_file_that_is_not_a_batch_is_refused(content: bytes, tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    file = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(content)
    assert f"{tmp_path} cannot be read as CIFAR-10" in refused(cifar10_as_it_lies(tmp_path), tmp_path)


@pytest.mark.parametrize(("sizes", "message"), [({"train": 49}, "training images"), ({"test": 9}, "test images")])
def test_another_number_of_images_is_refused(sizes: dict[str, int], message: str, tmp_path: Path) -> None:
    text = refused(replace(write_cifar10(tmp_path), **sizes), tmp_path)  # type: ignore[arg-type]
    assert message in text
    assert "not torch.uint8 [" in text


def test_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    assert "labels from 0 to 8" in refused(replace(write_cifar10(tmp_path), classes=9), tmp_path)


def test_idx_files_are_read_packed_and_unpacked(tmp_path: Path) -> None:
    packed = read_images(write_fashion_mnist(tmp_path / "a"), DataOptions(tmp_path / "a"))
    unpacked = read_images(write_fashion_mnist(tmp_path / "b", unpacked=True), DataOptions(tmp_path / "b"))
    for a, b in zip(packed, unpacked, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
    np.testing.assert_array_equal(packed[0].x[..., 0].numpy(), pixels(TRAIN, 28, 28))


@pytest.mark.parametrize("unpacked", [False, True])
def test_a_corrupt_idx_file_is_named(unpacked: bool, tmp_path: Path) -> None:
    source = write_fashion_mnist(tmp_path, unpacked)
    file = tmp_path / "FashionMNIST" / "raw" / f"train-images-idx3-ubyte{'' if unpacked else '.gz'}"
    file.write_bytes(file.read_bytes()[:-1])
    assert f"corrupt: {file}" in refused(source, tmp_path)


def test_an_idx_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """The right number of bytes with an invalid header."""
    source = write_fashion_mnist(tmp_path, unpacked=True)
    file = tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert "cannot be read as Fashion-MNIST" in refused(source, tmp_path)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a local server of the files in ``tmp_path``."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def from_there(source: ImageSource, address: str) -> ImageSource:
    """The source with the address of its files."""
    dataset = source.dataset()
    return replace(source, dataset=lambda: type(dataset.__name__, (dataset,), {"mirrors": [address]}))


def test_missing_files_are_downloaded_on_request(address: str, tmp_path: Path) -> None:
    source = from_there(write_fashion_mnist(tmp_path / "there"), f"{address}there/FashionMNIST/raw/")
    assert "missing" in refused(source, tmp_path / "here")
    train, _ = read_images(source, DataOptions(tmp_path / "here", download=True))
    np.testing.assert_array_equal(train.x[..., 0].numpy(), pixels(TRAIN, 28, 28))


def test_a_download_that_fails_says_so(address: str, tmp_path: Path) -> None:
    source = from_there(write_fashion_mnist(tmp_path / "there"), f"{address}gone/")
    text = refused(source, tmp_path / "here", download=True)
    assert "could not be downloaded" in text
    assert "404" in text
    assert source.home in text


def test_an_archive_is_downloaded_checked_and_unpacked(address: str, tmp_path: Path) -> None:
    source = write_cifar10(tmp_path / "there")
    with tarfile.open(tmp_path / "small.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "there" / "cifar-10-batches-py", "cifar-10-batches-py")
    where = {"url": f"{address}small.tar.gz", "filename": "small.tar.gz", "tgz_md5": md5(tmp_path / "small.tar.gz")}
    here = replace(source, dataset=lambda: type("CIFAR10", (source.dataset(),), where))
    train, _ = read_images(here, DataOptions(tmp_path / "here", download=True))
    np.testing.assert_array_equal(planes(train.x), pixels(TRAIN, 3072).reshape(-1, 3, 32, 32))
    spoiled = replace(source, dataset=lambda: type("CIFAR10", (source.dataset(),), {**where, "tgz_md5": "0" * 32}))
    assert "could not be downloaded" in refused(spoiled, tmp_path / "elsewhere", download=True)
