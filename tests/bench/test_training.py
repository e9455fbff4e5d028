"""Sizes, samples and sides of the cases of training."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from esper.bench import training
from esper.bench.case import BenchArgs, load_case
from esper.bench.fixtures import growth_env, image_task
from esper.bench.training import HostOf, blend, samples_of, short
from esper.config import ConfigError
from esper.core.site import Role
from esper.data.split import Split
from esper.data.tasks import load_task
from esper.training.counterfactual import CounterfactualHelper
from esper.training.validate import evaluate

CPU = torch.device("cpu")


def test_bars_are_set_at_sizes_that_are_measured() -> None:
    size = (4, 128, 8)
    case = load_case("train-epoch")
    assert training.BARS["cpu", size] == 3
    assert samples_of(size, CPU, quick=False) == 2432
    assert case.sizes[0] == size
    sizes = {"cpu": case.sizes, "cuda": case.cuda}
    for device, barred in training.BARS:
        assert barred in sizes[device]
    for name, _, barred in training.TASK_BARS:
        assert len(barred) == len(load_case(name).sizes[0])


@pytest.mark.parametrize("size", [(1, 32, 8), (4, 128, 8), (8, 512, 32)])
def test_an_epoch_consists_of_full_batches(size: tuple[int, int, int]) -> None:
    for quick, fewest in ((True, 1), (False, 2)):
        samples = samples_of(size, CPU, quick)
        assert samples % size[1] == 0
        assert samples >= fewest * size[1]


@contextmanager
def rows_of_baselines() -> Iterator[list[int]]:
    """Rows that pass through the heads of networks without slots."""
    rows: list[int] = []

    def count(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, nn.Flatten):
            rows.append(len(inputs[0]))

    handle = register_module_forward_pre_hook(count)
    yield rows
    handle.remove()


def test_baselines_train_on_the_samples_that_their_rates_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("esper.bench.baselines.usable_cores", lambda: 1)
    monkeypatch.setattr(training, "samples_of", lambda *size: 12)
    args = BenchArgs(sizes=((2, 4, 2),), quick=True)
    for comparison in load_case("train-epoch").comparisons(args):
        with rows_of_baselines() as rows:
            comparison.run_baseline()
        assert sum(rows) == comparison.amount == 24
        assert comparison.baseline.startswith("tuned PyTorch: ")


def test_an_epoch_of_a_task_has_full_batches_only() -> None:
    digits = load_task("digits")
    assert short(digits, 100, quick=False).samples == 900
    few = short(digits, 100, quick=True)
    assert few.samples == 100
    assert isinstance(few.train, Split)
    assert isinstance(digits.train, Split)
    assert few.train.y.data_ptr() == digits.train.y.data_ptr()  # not copied


def test_a_task_that_the_baseline_cannot_train_is_refused() -> None:
    task = load_task("digits")
    other = replace(task, loss=lambda outputs, y: outputs[:, 0] * y, score="accuracy")
    with pytest.raises(ConfigError, match="the loss cross_entropy, and digits is"):
        short(other, 64, quick=False)
    with pytest.raises(ConfigError, match="digits has 997 training samples, fewer"):
        short(task, 2_000, quick=False)


def test_other_processes_can_make_the_hosts() -> None:
    made = pickle.loads(pickle.dumps(HostOf("digits", torch.zeros(2, 1, 8, 8))))()
    host = load_task("digits").build_host()
    assert sum(p.numel() for p in made.parameters()) == host.parameter_count
    assert not isinstance(made, type(host))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_both_sides_train_the_hosts_of_the_task(
    optimizer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "HORIZON", 2)
    monkeypatch.setattr("esper.bench.baselines.usable_cores", lambda: 1)
    args = BenchArgs(
        sizes=((2, 64),), quick=True, optimizer=optimizer, precision="float32"
    )
    for name in ("train-task", "grow-task"):
        for comparison in load_case(name).comparisons(args):
            for _ in range(3):  # more than an episode
                comparison.run()
                comparison.run_baseline()
            assert comparison.case == name
            assert comparison.amount == 128
            size = f"digits, E 2, batch 64, {optimizer or 'sgd'}, 64 samples"
            assert comparison.size == size
            assert "float32" in comparison.baseline


def test_several_workers_are_compared_with_one() -> None:
    args = BenchArgs(sizes=((2, 64),), quick=True)
    (comparison,) = load_case("workers").comparisons(args)
    assert comparison.baseline == "one worker"
    assert comparison.amount == 128


def test_configurations_evaluated_together_and_separately_agree() -> None:
    task = image_task(8, 2, CPU, validation=20)
    with growth_env(task, envs=1, batch=4) as env:
        host = env.training[0]
        blend(host)
        assert sum(site.role is Role.BLENDED for site in host.sites) == 3
        everything = CounterfactualHelper().plan(host.sites, costly=True)
        assert len(set(everything)) == 8
        together = evaluate(host, task.validation, everything)
        for row, configuration in enumerate(everything):
            alone = evaluate(host, task.validation, [configuration])
            assert torch.equal(together.correct[row], alone.correct[0])
            torch.testing.assert_close(together.loss[row], alone.loss[0])
