"""The cases of `esper-bench stage-batch` for pytest-benchmark: `pytest benchmarks`.

Each benchmark is one side of a comparison; compare the sides by group. `esper-bench` judges ratios against the bars.
"""

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from esper.bench.runner import Comparison
from esper.bench.stage_batch import MEAN, STD, comparisons, torchvision_pipeline
from esper.ops import normalisation_table, stage_images

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


def test_both_sides_normalise_alike() -> None:
    # What is drawn differs between the two, so only what comes after can be compared.
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    own, _ = stage_images(images, torch.arange(4), normalisation_table(MEAN, STD))
    cast, normalise = torchvision_pipeline(8).transforms[2:]
    torch.testing.assert_close(own, normalise(cast(images.permute(0, 3, 1, 2))), rtol=1e-5, atol=1e-6)
