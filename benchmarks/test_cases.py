"""The cases of `esper-bench` for pytest-benchmark: `pytest benchmarks`.

Each benchmark is one side of a comparison; compare the sides by group. `esper-bench` judges ratios against the bars.
Cases that run hosts contribute their first comparison, with minimal work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib import import_module

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from esper.bench import OPERATORS, RUNS
from esper.bench.case import BenchArgs, BenchCase
from esper.bench.runner import waiting
from esper.bench.session import devices
from esper.config import ConfigError

DEVICES = devices("auto")


def timed() -> Iterator[object]:
    """Every comparison of times; a case whose baseline is not installed is skipped with the reason."""
    for name, module in OPERATORS.items():
        try:
            found = import_module(module).comparisons(BenchArgs(devices=DEVICES))
            yield from (pytest.param(c, id=label(c)) for c in found if c.unit == "us")
        except ConfigError as error:
            yield pytest.param(None, id=name, marks=pytest.mark.skip(reason=str(error)))


def label(comparison: BenchCase) -> str:
    return f"{comparison.device}, {comparison.size}, {comparison.case} / {comparison.baseline}"


COMPARISONS = list(timed())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[BenchCase]:
    """The first comparison of a case, whose hosts live until the test is over."""
    case, device = request.param
    with closing(
        import_module(RUNS[case]).comparisons(BenchArgs(devices=(device,), quick=True))
    ) as found:
        try:
            comparison = next(found)
        except ConfigError as error:
            pytest.skip(str(error))
        yield comparison


every_run = pytest.mark.parametrize(
    "running",
    [
        pytest.param((case, device), id=f"{device}, {case}")
        for device in DEVICES
        for case in RUNS
    ],
    indirect=True,
)


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_esper(benchmark: BenchmarkFixture, comparison: BenchCase) -> None:
    benchmark.group = label(comparison)
    benchmark(waiting(comparison.run, comparison.device))


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_baseline(benchmark: BenchmarkFixture, comparison: BenchCase) -> None:
    benchmark.group = label(comparison)
    benchmark(waiting(comparison.run_baseline, comparison.device))


@every_run
def test_run(benchmark: BenchmarkFixture, running: BenchCase) -> None:
    benchmark.group = label(running)
    benchmark.pedantic(waiting(running.run, running.device), rounds=3, warmup_rounds=1)


@every_run
def test_run_baseline(benchmark: BenchmarkFixture, running: BenchCase) -> None:
    if running.unit == "%":
        pytest.skip("the baseline is a budget")
    benchmark.group = label(running)
    benchmark.pedantic(
        waiting(running.run_baseline, running.device), rounds=3, warmup_rounds=1
    )
