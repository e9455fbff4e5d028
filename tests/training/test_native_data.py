"""Data, losses and scores of native passes beside those of eager ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.core.stage import SeedStage as S
from esper.data.objective import squared_error
from esper.data.split import Split
from esper.data.task import Task, resolve
from esper.hosts.cnn import CNNHost
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.native import NativePasses
from esper.training.step import train_epoch
from tests.core_helpers import plant, tiny_config
from tests.data.objective_tasks import X, task
from tests.training.byte_images import byte_digits
from tests.training.native_pairs import (
    both,
    check_alike,
    check_validation,
    doubled,
    trained,
)

WIDE = torch.stack([X[:, 0] - X[:, 1], X[:, 2] * X[:, 3], X[:, 4]], dim=1)


def of_images() -> Task:
    """Digits in bytes whose targets are numbers."""
    known = byte_digits()
    splits = {}
    for name in ("train", "validation", "test"):
        split = getattr(known, name)
        splits[name] = Split(split.x, split.y.float() / 10, split.table)
    host = lambda: CNNHost(1, 1, base=8, blocks=2)  # noqa: E731
    return replace(known, classes=None, build_host=host, loss="mse", **splits)


TASKS: dict[str, Callable[[], Task]] = {
    "mse of one output": lambda: task("mse"),
    "mse of numbers": lambda: task("mse", y=X[:, 0] - X[:, 1]),
    "mse of three outputs": lambda: task("mse", y=WIDE, outputs=3),
    "mse of integers": lambda: task("mse", y=(4 * WIDE).long(), outputs=3),
    "mse by the signs": lambda: task(
        "mse", y=(WIDE > 0).float(), outputs=3, score="accuracy"
    ),
    "bce of labels": lambda: task("bce", y=WIDE > 0, outputs=3, score=None),
    "bce of probabilities": lambda: task(
        "bce", y=torch.sigmoid(WIDE), outputs=3, score="r2"
    ),
    "images in bytes": of_images,
}


def training_of(of: Task, optimizer: str = "sgd", site: str = "r0c0") -> HostTraining:
    values = {"batch_size": 17, "optimizer": optimizer, "learning_rate": 0.01}
    config = resolve(tiny_config(task={**values, "samples_per_epoch": 51}), of)
    training = HostTraining(0, of, config, make_metrics(1, torch.device("cpu"))[0])
    training.reset(0, 0)
    plant(training, site, "norm", "GATED_GATE", S.TRAINING, 0.6)
    return training


@pytest.mark.parametrize("exact", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", TASKS)
def test_losses_and_scores_of_samples_are_those_of_pytorch(
    name: str, optimizer: str, exact: bool
) -> None:
    def make() -> HostTraining:
        training = training_of(replace(TASKS[name](), evaluation_batch=150), optimizer)
        return doubled(training) if exact else training

    eager, native = trained(make, 2)
    tolerance = 1e-9 if exact else 1e-5
    check_alike(eager, native, tolerance)
    check_validation(eager, native, tolerance)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_losses_that_are_not_finite_are_counted_as_by_pytorch(
    loss: str, value: float
) -> None:
    def make() -> HostTraining:
        y = (WIDE > 0).float()
        training = training_of(task(loss, y=y, outputs=3, score="accuracy"))
        with torch.no_grad():
            list(training.host.parameters())[-1][1] = value
        return training

    eager, native = trained(make)
    assert int(eager.totals.training[-1]) == 51
    check_alike(eager, native)
    check_validation(eager, native)


def halved(outputs: Tensor, y: Tensor) -> Tensor:
    return squared_error(outputs, y) / 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: task(halved), "losses other than cross_entropy, mse and bce"),
        (lambda: task("mse", score=halved), "scores other than accuracy and r2"),
        (
            lambda: task("mse", y=X[:, :1].double()),
            "targets in torch.float64 for outputs in torch.float32",
        ),
    ],
)
def test_an_objective_without_a_compiled_form_is_named_and_left_to_pytorch(
    make: Callable[[], Task], words: str
) -> None:
    eager, native = both(lambda: training_of(make()))
    assert native.native is not None
    assert words in str(native.native.obstacle())
    train_epoch(eager)
    train_epoch(native)
    assert list(native.native.reasons.values()) == [1]
    for parameter, other in zip(
        eager.host.parameters(), native.host.parameters(), strict=True
    ):
        assert torch.equal(parameter, other)


def test_targets_that_do_not_fit_the_outputs_are_refused() -> None:
    training = training_of(task("mse", y=WIDE, outputs=3))
    training.native = NativePasses(training)
    assert training.feed is not None
    training.feed.split = Split(training.feed.split.x, training.feed.split.y[:, :2])
    with pytest.raises(RuntimeError, match=r"targets of shape .* do not fit 3 outputs"):
        train_epoch(training)
