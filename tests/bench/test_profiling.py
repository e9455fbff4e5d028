"""Idle time from the spans of a GPU, and peak memory. Traces are tested through the command."""

from __future__ import annotations

import pytest
import torch

from esper.bench.profiling import idle_share, peak_megabytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0, 10)], 0.0),
        ([(0, 10), (30, 40)], 50.0),
        ([(30, 40), (0, 10), (5, 20), (6, 8)], 25.0),
        ([(0, 40), (10, 20), (50, 80)], 12.5),
    ],
)
def test_a_gpu_is_idle_when_no_stream_runs(
    spans: list[tuple[int, int]], share: float
) -> None:
    assert idle_share(spans) == pytest.approx(share)


def test_an_unused_gpu_has_no_idle_share() -> None:
    with pytest.raises(ValueError, match="nothing ran on the GPU"):
        idle_share([])


def test_peak_memory_counts_tensors_alive_at_the_same_time() -> None:
    def run() -> None:
        for _ in range(3):
            first = torch.empty(1_000_000, dtype=torch.float64)
            second = torch.empty(500_000, dtype=torch.float64)
            del first, second

    assert peak_megabytes(run, CPU) == pytest.approx(
        12, rel=0.02
    )  # allocations are rounded up
