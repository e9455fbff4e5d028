"""Splits in memory: inputs of networks, rows evenly spaced, and the checks of their tensors."""

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
from esper.data.split import Split
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.validate import evaluate
from tests.data.byte_images import CPU, colours, looked_up


def test_networks_see_each_pixel_through_the_table_of_its_channel() -> None:
    split = colours()
    seen = split.inputs(3, 20)
    assert torch.equal(seen, looked_up(split, torch.arange(3, 20)))
    assert seen.dtype == torch.float32
    assert seen.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(split.inputs(3, 20, torch.bfloat16), seen.bfloat16())
    # A slice ends where the data does.
    assert split.inputs(35, 100).shape == (5, 3, 6, 6)
    pixel = split.x[0, 0, 0].double() / 255
    values = (pixel - torch.tensor([0.2, 0.4, 0.6])) / torch.tensor([0.1, 0.2, 0.3])
    torch.testing.assert_close(split.inputs(0, 1)[0, :, 0, 0], values.float())


def test_a_split_moves_with_its_table() -> None:
    split = colours().to(torch.device("meta"))
    assert split.table is not None
    assert {tensor.device.type for tensor in (split.x, split.y, split.table)} == {
        "meta"
    }
    plain = Split(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)).to(CPU)
    assert plain.table is None


def changed(**fields: Tensor) -> Split:
    split = colours(4)
    return Split(**{"x": split.x, "y": split.y, "table": split.table, **fields})  # type: ignore[arg-type]


GOOD = colours(4)


WRONG = {
    "float32 pixels": changed(x=GOOD.x.float()),
    "no channels": changed(x=GOOD.x[..., 0]),
    "text": changed(y=torch.zeros(4, 2, dtype=torch.int64)),
    "table of one channel": changed(table=torch.zeros(1, 256)),
    "table of float64": changed(table=torch.zeros(3, 256).double()),
    "permuted": changed(x=torch.zeros(4, 3, 6, 6).byte().permute(0, 2, 3, 1)),
    "every other target": changed(y=torch.zeros(8, dtype=torch.int64)[::2]),
    "too many channels": changed(
        x=torch.zeros(4, 2, 2, 33).byte(), table=torch.zeros(33, 256)
    ),
    "no pixels": changed(x=torch.zeros(4, 0, 6, 3).byte()),
}


@pytest.mark.parametrize("what", WRONG)
def test_bytes_that_cannot_be_staged_are_refused(what: str) -> None:
    with pytest.raises(ConfigError, match="mine, train split: with a table, inputs"):
        WRONG[what].check("mine, train split", 10)
    GOOD.check("good", 10)


def test_evenly_spaced_rows() -> None:
    rows = torch.arange(11).unsqueeze(1)
    assert Split(x=rows, y=rows).evenly_spaced(3).x.flatten().tolist() == [0, 5, 10]
    assert Split(x=rows, y=rows).evenly_spaced(20).x.flatten().tolist() == list(
        range(11)
    )


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
    results = []
    for each in (task(), streamed()[0]):
        grown = esper.grow(each, "random", epochs=5)
        weights = [p.tolist() for p in grown.network.parameters()]
        results.append((grown.accuracy, grown.alone, grown.seeds, weights))
    assert results[0] == results[1]


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
