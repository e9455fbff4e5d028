"""Image tasks, read from small files in the real formats, and the messages for missing and corrupt files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

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
    assert (
        CIFAR10.train - CIFAR10.held_out,
        CIFAR10.held_out,
        CIFAR10.validation,
        CIFAR10.test,
    ) == (
        45_000,
        5_000,
        2_500,
        10_000,
    )


def seen(split: Split) -> torch.Tensor:
    """All inputs of a split as networks see them."""
    return split.inputs(0, len(split))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_data_set_is_read_and_normalised(kind: str, tmp_path: Path) -> None:
    source = WRITERS[kind](tmp_path)
    train, validation, test = read_splits(source, DataOptions(tmp_path))
    assert [len(train), len(validation), len(test)] == [
        TRAIN - HELD_OUT,
        VALIDATION,
        TEST,
    ]
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
    torch.testing.assert_close(
        now, (first - first.min()) * slope + now.min(), rtol=1e-4, atol=1e-4
    )
    assert test.y.tolist() == [i % source.classes for i in range(TEST)]
    assert raw.x.dtype == torch.uint8


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
    assert (
        float(held_out.min())
        < float(first[0].x[:, 0, 0, 0].median())
        < float(held_out.max())
    )


def test_a_preset_makes_a_task_of_a_data_set(tmp_path: Path) -> None:
    preset = replace(PRESETS[0], source=write_cifar10(tmp_path))
    task = preset.load(DataOptions(tmp_path))
    assert (task.name, task.classes, task.samples_per_epoch, task.batch_size) == (
        "cifar10",
        10,
        40,
        128,
    )
    assert (task.n_envs, task.episode_length, task.learning_rate) == (8, 75, 0.05)
    assert task.build_host()(task.train.inputs(0, 2)).shape == (2, 10)


def test_hosts_train_and_validate_on_the_same_images_in_memory(tmp_path: Path) -> None:
    task = replace(PRESETS[0], source=write_cifar10(tmp_path)).load(
        DataOptions(tmp_path)
    )
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
            assert training.host.parameter_count == 6_418
        assert all(0 <= accuracy <= 100 for accuracy in env.test_accuracy())


@pytest.mark.trap(12)
def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    task = replace(PRESETS[0], source=write_cifar10(tmp_path)).load(
        DataOptions(tmp_path)
    )
    with pytest.raises(
        ConfigError, match="batch_size is 128, larger than the 40 samples"
    ):
        resolve(TrainingConfig(), task)


@pytest.mark.parametrize("name", [preset.name for preset in PRESETS])
def test_missing_data_is_one_message_with_instructions(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task(name, DataOptions(tmp_path / "nowhere"))
    text = str(caught.value)
    assert str(tmp_path / "nowhere") in text
    assert "missing: " in text
    assert "--set task.download=true" in text
    assert "https://" in text
    assert "ESPER_DATA" in text
    assert not (tmp_path / "nowhere").exists()
