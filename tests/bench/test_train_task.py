"""Hosts of the case `train-task`: those of a task, in short epochs, beside the same ones in plain PyTorch."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from esper.bench import train_task
from esper.bench.case import BenchArgs
from esper.bench.train_task import HostOf, comparisons, short
from esper.config import ConfigError
from esper.data.split import Split
from esper.data.tasks import load_task

CPU = torch.device("cpu")


def test_an_epoch_has_full_batches_only() -> None:
    task = short(load_task("digits"), 100, quick=False)
    assert task.samples == 900
    assert short(load_task("digits"), 100, quick=True).samples == 100


def test_a_task_that_the_baseline_cannot_train_is_refused() -> None:
    task = load_task("digits")
    with pytest.raises(
        ConfigError, match="the loss cross_entropy, and digits is another"
    ):
        short(
            replace(task, loss=lambda outputs, y: outputs[:, 0] * y, score="accuracy"),
            64,
            quick=False,
        )
    with pytest.raises(
        ConfigError, match="digits has 997 training samples, fewer than a batch of 2000"
    ):
        short(task, 2_000, quick=False)


def test_other_processes_can_make_the_hosts() -> None:
    made = pickle.loads(pickle.dumps(HostOf("chars")))()
    assert made.parameter_count == load_task("chars").build_host().parameter_count


@pytest.mark.parametrize(("task", "optimizer"), [("digits", None), ("digits", "adamw")])
def test_both_sides_train_the_hosts_of_the_task(
    task: str, optimizer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_task, "HORIZON", 2)
    monkeypatch.setattr("esper.bench.tuned.usable_cores", lambda: 1)
    args = BenchArgs(
        sizes=((2, 64),),
        quick=True,
        task=task,
        optimizer=optimizer,
        precision="float32",
    )
    cases = []
    for case in comparisons(args):
        for _ in range(3):  # more than an episode
            case.run()
            case.run_baseline()
        cases.append(case)
    assert [case.case for case in cases] == [
        "train-task",
        "train-task: a step of growth by heuristic",
    ]
    assert {case.amount for case in cases} == {128}
    assert f"digits, E 2, batch 64, {optimizer or 'sgd'}, 64 samples" in cases[0].size
    assert "float32" in cases[0].baseline


def test_data_is_not_copied_whole() -> None:
    task = load_task("digits")
    assert isinstance(task.train, Split)
    train = short(task, 64, quick=True).train
    assert isinstance(train, Split)
    assert train.y.data_ptr() == task.train.y.data_ptr()
