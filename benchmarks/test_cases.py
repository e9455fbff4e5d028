"""The cases of `esper-bench` for pytest-benchmark: `pytest benchmarks`.

Each benchmark is one side of a comparison; compare the sides by group. `esper-bench` judges ratios against the bars.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from esper.bench.main import CASES
from esper.bench.runner import Comparison
from esper.config import ConfigError


def timed() -> Iterator[object]:
    """Every comparison of times; a case whose baseline is not installed is skipped with the reason."""
    for name, module in CASES.items():
        try:
            found = import_module(module).comparisons()
            yield from (pytest.param(c, id=label(c)) for c in found if c.unit == "us")
        except ConfigError as error:
            yield pytest.param(None, id=name, marks=pytest.mark.skip(reason=str(error)))


def label(comparison: Comparison) -> str:
    return f"{comparison.device}, {comparison.size}, {comparison.case} / {comparison.baseline}"


COMPARISONS = list(timed())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_esper(benchmark: BenchmarkFixture, comparison: Comparison) -> None:
    benchmark.group = label(comparison)
    benchmark(comparison.run)


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_baseline(benchmark: BenchmarkFixture, comparison: Comparison) -> None:
    benchmark.group = label(comparison)
    benchmark(comparison.run_baseline)
