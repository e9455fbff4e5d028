"""Validation on data that does not fit in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import esper
import esper.data.task
from esper.config import ConfigError
from esper.data.streamed_split import StreamedSplit
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.validate import evaluate

X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


class Rows(Dataset[Any]):
    """Counts its reads."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.reads = x, y, 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> Any:
        self.reads += 1
        return self.x[row], int(self.y[row])


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def task() -> esper.Task:
    parts = (
        esper.Split(X[rows], Y[rows])
        for rows in (slice(0, 50), slice(50, 70), slice(70, 90))
    )
    train, validation, test = parts
    return esper.Task(
        name="rows",
        classes=2,
        build_host=lambda: esper.graft(model(), {"r0c0": "0"}, "mlp"),
        train=train,
        validation=validation,
        test=test,
        batch_size=10,
        evaluation_batch=8,
    )


def streamed() -> tuple[esper.Task, Rows]:
    data: Any = Rows(X[50:70], Y[50:70])
    return replace(task(), validation=data, test=Rows(X[70:], Y[70:])), data  # type: ignore[arg-type]


def test_a_streamed_validation_measures_the_same() -> None:
    grown, same = (
        esper.grow(each, "random", epochs=5) for each in (task(), streamed()[0])
    )
    assert (grown.accuracy, grown.alone, grown.seeds) == (
        same.accuracy,
        same.alone,
        same.seeds,
    )
    assert [p.tolist() for p in grown.network.parameters()] == [
        p.tolist() for p in same.network.parameters()
    ]


def test_each_validation_reads_each_sample_once() -> None:
    """This holds for captured passes, which would otherwise see the first samples forever."""
    each, data = streamed()
    config = esper.TrainingConfig().with_values(env={"n_envs": 1, "episode_length": 2})
    training = HostTraining(
        0,
        each,
        esper.data.task.resolve(config, each),
        make_metrics(1, each.device, 4, 20)[0],
    )
    training.reset(0, 0)
    training.repeat = lambda _key, _work: pytest.fail("captured")
    data.reads = 0
    evaluate(training, each.validation, [(0.0,)], totals=training.totals)
    assert data.reads == len(each.validation) == 20
    assert torch.equal(each.validation.evenly_spaced(3).x, X[[50, 60, 69]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda x, y: (x, y + 1),
            "rows, validation split: sample 0: target 2 is not between 0 and 1",
        ),
        (lambda x, y: (x / 0, y), "sample 0: its inputs are not finite"),
        (lambda x, y: (x[:0], y[:0]), "it has no samples"),
        (lambda x, y: (x[:5], y), "reading rows from 0 on: IndexError"),
    ],
)
def test_a_bad_sample_is_named_before_any_training(change: Any, words: str) -> None:
    x, y = change(X[50:70], torch.ones(20, dtype=torch.int64))
    with pytest.raises(ConfigError, match=words):
        replace(task(), validation=Rows(x, y))  # type: ignore[arg-type]


def test_a_dataset_becomes_a_streamed_split() -> None:
    each, data = streamed()
    assert isinstance(each.validation, StreamedSplit)
    assert each.validation.dataset is data
    assert isinstance(replace(each, name="other").validation, StreamedSplit)
