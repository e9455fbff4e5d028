"""The tuned baseline: the ways that are tried, and that hosts learn in each."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch

from esper.bench import tuned
from esper.bench.fixtures import split
from esper.bench.plain import plain_cnn
from esper.bench.tuned import Loop, Recipe, TunedTraining, Way, Work, workers
from tests.selection import slow_except

CPU = torch.device("cpu")
RECIPE = Recipe(partial(plain_cnn, 3, 10, 4, 2))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    y = torch.arange(64) % 10
    x = torch.randn(64, 3, 8, 8) + y.view(-1, 1, 1, 1)
    return x, y


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_hosts_learn_in_each_way(precision: torch.dtype, channels_last: bool) -> None:
    loop = Loop(Way(precision, channels_last), Work(RECIPE, 2, *data(), batch=16))
    first = loop.epoch()
    for _ in range(8):
        last = loop.epoch()
    assert last < 0.8 * first


@pytest.mark.slow  # tests of Loop and of Processes are fast
def test_processes_share_the_hosts_and_train_all_of_them() -> None:
    with closing(
        workers(Way(processes=2), Work(RECIPE, 3, *data(), batch=16))
    ) as spread:
        first = spread.epoch()
        for _ in range(8):
            last = spread.epoch()
    assert len(first) == len(last) == 2
    for loss, before in zip(last, first, strict=True):
        assert loss < 0.8 * before
    assert [process.exitcode for process in spread.processes] == [0, 0]


def test_the_fastest_of_the_tried_ways_is_taken_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = Way(torch.bfloat16, channels_last=True, processes=2)

    def seconds(*given: object) -> float:
        way = given[-1]
        assert isinstance(way, Way)
        return sum(getattr(way, name) != getattr(wanted, name) for name in vars(wanted))

    monkeypatch.setattr(tuned, "_seconds_of_one", seconds)
    monkeypatch.setattr(tuned, "_seconds_of_all", seconds)
    monkeypatch.setattr(tuned, "usable_cores", lambda: 2)
    monkeypatch.setattr(tuned, "_start", lambda _way, work: Loop(Way(), work))
    with closing(TunedTraining(RECIPE, 2, split(64, 0, CPU), 16)) as training:
        assert training.way == wanted
        assert (
            training.name
            == "tuned PyTorch: bfloat16 channels_last, eager, 2 processes of 1 thread"
        )
        assert {way.compiled for way in training.tried} == {False, True}
        assert {way.threads for way in training.tried} == {1, 2}


@pytest.mark.parametrize("cores", slow_except([1], [1, 2]))
def test_the_ways_are_timed_by_training(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one process, and with more cores those of several processes and threads as well."""
    monkeypatch.setattr(tuned, "TRIED_STEPS", 1)
    monkeypatch.setattr(tuned, "TURNS", 1)
    monkeypatch.setattr(tuned, "usable_cores", lambda: cores)
    with closing(
        TunedTraining(RECIPE, 2, split(32, 0, CPU), 16, compiles=False)
    ) as training:
        assert all(seconds > 0 for seconds in training.tried.values())
        assert len(training.tried) == 4 if cores == 1 else len(training.tried) >= 6
        losses = training.epoch()
        assert torch.tensor(losses).gt(0).all()
