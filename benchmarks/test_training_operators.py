"""The cases of `esper-bench norm-relu-pool` and `esper-bench sgd` for pytest-benchmark: `pytest benchmarks`.

Each benchmark is one side of a comparison; compare the sides by group. `esper-bench` judges ratios against the bars.
"""

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from esper.bench import norm_relu_pool, sgd
from esper.bench.runner import Comparison

CASES = [*norm_relu_pool.comparisons(), *sgd.comparisons()]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def label(comparison: Comparison) -> str:
    return f"{comparison.device}, {comparison.size}, {comparison.case} / {comparison.baseline}"


@pytest.mark.parametrize("comparison", CASES, ids=label)
def test_esper(benchmark: BenchmarkFixture, comparison: Comparison) -> None:
    benchmark.group = label(comparison)
    benchmark(comparison.run)


@pytest.mark.parametrize("comparison", CASES, ids=label)
def test_baseline(benchmark: BenchmarkFixture, comparison: Comparison) -> None:
    benchmark.group = label(comparison)
    benchmark(comparison.run_baseline)
