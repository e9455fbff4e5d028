"""The cases of `esper-bench` for pytest-benchmark: `pytest benchmarks`.

Each benchmark is one side of a comparison; compare the sides by group. `esper-bench` judges ratios against the bars.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from esper.bench import CASES
from esper.bench.case import BenchArgs, BenchPair, load_case
from esper.bench.session import devices
from esper.config import ConfigError

DEVICES = devices("auto")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    found: torch.device = request.param
    return found


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, device: torch.device) -> Iterator[BenchPair]:
    """The first comparison of a case, at its quick sizes; what it holds lives until the test is over."""
    args = BenchArgs(devices=(device,), quick=True)
    with closing(load_case(request.param).comparisons(args)) as found:
        try:
            first = next(found)
        except ConfigError as error:
            pytest.skip(str(error))
        yield first


@pytest.mark.parametrize("side", ["run", "run_baseline"])
def test_side(benchmark: BenchmarkFixture, pair: BenchPair, side: str) -> None:
    benchmark.group = f"{pair.device}, {pair.size}, {pair.case} / {pair.baseline}"
    call = getattr(pair, side)

    def waited() -> None:
        call()
        if pair.device.type == "cuda":
            torch.cuda.synchronize(pair.device)

    benchmark.pedantic(waited, rounds=3, warmup_rounds=1)
