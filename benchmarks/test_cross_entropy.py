"""The cases of `esper-bench cross-entropy` for pytest-benchmark: `pytest benchmarks`.

Each benchmark is one side of a comparison; compare the sides by group. `esper-bench` judges ratios against the bars.
"""

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from esper.bench.cross_entropy import comparisons, public_loss
from esper.bench.memory import peak_bytes
from esper.bench.runner import Comparison
from esper.ops import cross_entropy

CASES = [comparison for comparison in comparisons() if comparison.unit == "us"]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_sides_compute_the_same(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.arange(64) % 10
    result = cross_entropy(logits, targets)
    loss, correct, count = public_loss(logits, targets)
    torch.testing.assert_close(result.loss, loss)
    assert torch.equal(result.correct.bool(), correct)
    assert result.stats[1] == count


def test_peak_memory_is_what_was_alive_at_a_time() -> None:
    def run() -> None:
        for _ in range(3):
            first = torch.empty(1000, dtype=torch.float64)
            second = torch.empty(500, dtype=torch.float64)
            del first, second

    assert peak_bytes(run, "cpu") == pytest.approx(12_000, rel=0.02)  # allocations are rounded up
