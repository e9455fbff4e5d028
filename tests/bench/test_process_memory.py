"""Peak memory of a separate process."""

from __future__ import annotations

import pytest
import torch

from esper.bench import process_memory

CPU = torch.device("cpu")


@pytest.mark.slow
def test_memory_is_measured_in_a_separate_process() -> None:
    peaks = process_memory.measure_in_a_process(1, 64, 8, CPU)
    assert peaks.keys() == {"peak RSS"}
    assert peaks["peak RSS"] > 1
    with pytest.raises(RuntimeError, match="measuring memory failed"):
        process_memory.measure_in_a_process(1, 64, 8, torch.device("meta"))
