"""The cases of `esper-bench grad-stats` for pytest-benchmark: `pytest benchmarks`.

Each benchmark is one side of a comparison; compare the sides by group. `esper-bench` judges ratios against the bars.
"""

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from esper.bench.grad_stats import comparisons, public_statistics
from esper.bench.runner import Comparison
from esper.ops import grad_stats

CASES = list(comparisons())


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


@pytest.mark.parametrize("joined", [True, False])
def test_both_sides_compute_the_same(joined: bool) -> None:
    gradients = [torch.randn(48, generator=torch.Generator().manual_seed(i)) for i in range(20)]
    gradients[3][:5] = 0
    torch.testing.assert_close(
        grad_stats([gradients]).fields[0], public_statistics(gradients, joined), rtol=2e-6, atol=0
    )
