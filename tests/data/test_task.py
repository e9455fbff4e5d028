"""A task: its checks, and the sizes that it gives to a config."""

from __future__ import annotations

import pwd
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.config import ConfigError, TrainingConfig
from esper.data.facts import weights_file
from esper.data.split import Split
from esper.data.task import Augmentation, DataOptions, resolve
from esper.files.atomic import given_path
from esper.telemetry.sink import FileSink
from tests.core_helpers import digits
from tests.data.byte_images import Rows, looked_up
from tests.data.objective_tasks import X, Y, task
from tests.training.byte_images import byte_digits


@pytest.mark.parametrize(
    ("augmentation", "words"),
    [
        (
            Augmentation(crop=8),
            "crop is 8; for images of this size it must be 0 to 7 pixels",
        ),
        (Augmentation(crop=-1), "crop is -1"),
    ],
)
def test_an_impossible_crop_is_refused(augmentation: Augmentation, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        byte_digits(augmentation=augmentation)


def test_augmentation_is_refused_unless_images_are_bytes() -> None:
    base = byte_digits()
    rows = Rows()
    for train in (Split(rows.x, rows.y), rows):
        with pytest.raises(
            ConfigError, match="augmentation needs uint8 training images with a table"
        ):
            replace(base, train=train, augmentation=Augmentation(flip=True))


def test_validation_and_calibration_see_images_as_they_are() -> None:
    task = byte_digits(augmentation=Augmentation(crop=3, flip=True))
    assert isinstance(task.train, Split)
    assert torch.equal(task.sample, looked_up(task.validation, torch.arange(3)))
    assert torch.equal(
        task.calibration_inputs(), looked_up(task.train, torch.arange(256))
    )
    assert torch.equal(
        task.calibration_inputs(5), looked_up(task.train, torch.arange(5))
    )


@pytest.mark.finding("M9")
@pytest.mark.parametrize("batch", [1, 100, 997])
def test_the_users_batch_size_is_used(batch: int) -> None:
    config = TrainingConfig.parse({"task": {"batch_size": batch, "learning_rate": 0.5}})
    resolved = resolve(config, digits()).task
    assert (resolved.batch_size, resolved.learning_rate) == (batch, 0.5)


@pytest.mark.trap(12)
@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"batch_size": 998}, "batch_size is 998"),
        ({"batch_size": 65, "samples_per_epoch": 64}, "larger than the 64 samples"),
        ({"samples_per_epoch": 998}, "997 training samples"),
    ],
)
def test_an_impossible_batch_is_refused(task: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(TrainingConfig.parse({"task": task}), digits())


def test_targets_that_are_not_classes_need_a_loss_of_their_own() -> None:
    splits = [
        esper.Split(X[rows], Y[rows])
        for rows in (slice(0, 64), slice(64, 80), slice(80, 96))
    ]
    words = r"mine, train split: targets are torch.float32 of shape \(64, 1\); .*classes=None with a loss"
    with pytest.raises(esper.ConfigError, match=words):
        esper.Task("mine", 3, task().build_host, *splits)
    with pytest.raises(
        esper.ConfigError, match="mine: the loss cross_entropy needs classes"
    ):
        esper.Task("mine", None, task().build_host, *splits)


def test_another_optimizer_needs_its_own_rate() -> None:
    config = esper.TrainingConfig.parse({"task": {"optimizer": "adamw"}})
    with pytest.raises(
        esper.ConfigError,
        match=r"rate of mine, 0\.05, is for sgd: set task.learning_rate, too",
    ):
        resolve(config, task())
    resolved = resolve(config.with_values(task={"learning_rate": 0.003}), task())
    assert (resolved.task.optimizer, resolved.task.weight_decay) == ("adamw", 5e-4)
    assert resolved.task.warmup_epochs == 0.0
    assert resolve(config, task(optimizer="adamw")).task.learning_rate == 0.05
    with pytest.raises(esper.ConfigError, match="must be below 1"):
        resolve(config.with_values(task={"beta2": 1.0}), task(optimizer="adamw"))
    with pytest.raises(esper.ConfigError, match=r"task.optimizer: .*'sgd' or 'adamw'"):
        resolve(esper.TrainingConfig(), task(optimizer="adam"))


def test_labels_are_smoothed_only_where_they_are_classes() -> None:
    config = esper.TrainingConfig.parse({"task": {"label_smoothing": 0.1}})
    with pytest.raises(
        esper.ConfigError,
        match=r"label_smoothing is 0\.1, but .* cross_entropy .*; mine needs 0",
    ):
        resolve(config, task())
    assert (
        resolve(
            config.with_values(task={"label_smoothing": 0.0}), task()
        ).task.label_smoothing
        == 0
    )
    with pytest.raises(esper.ConfigError, match=r"task\.label_smoothing"):
        esper.TrainingConfig.parse({"task": {"label_smoothing": 1.5}})


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that the machine does not know, as in a container with a number of its own."""

    def unknown(_who: object) -> Any:
        raise KeyError

    for name in ("HOME", "ESPER_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def options(**values: object) -> DataOptions:
    return DataOptions.of(TrainingConfig.parse({"task": values}).task)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_only_what_needs_it_is_refused() -> None:
    assert options().folder == Path("~/.cache/esper")
    assert options(data="/data", download=True).folder == Path("/data")
    for needing in (
        lambda: options(download=True),
        lambda: options(data="~/data"),
        lambda: weights_file("~/host"),
        lambda: given_path("~/run"),
        lambda: FileSink("~/log"),
    ):
        with pytest.raises(ConfigError, match="no such home folder; give a path"):
            needing()
