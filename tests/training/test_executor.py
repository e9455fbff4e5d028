"""Errors of executors: their place, and several errors as one."""

from __future__ import annotations

import pytest
import torch

from esper.data.shared_batches import SharedBatchError
from esper.training.executor import (
    DeviceFailed,
    HostError,
    RankFailed,
    RankLost,
    is_expected,
    merged,
)


class Place:
    epoch, batch = 3, 7

    def __init__(self, index: int) -> None:
        self.index = index


def test_several_errors_become_the_first_one_with_the_causes_of_all() -> None:
    causes = [ValueError("a"), KeyError("b"), OSError("c")]
    first, *others = (
        HostError(Place(index), cause) for index, cause in enumerate(causes)
    )
    assert merged([first, *others]) is first
    assert first.causes == tuple(causes)
    assert first.__notes__ == [f"It was not the only one: {other}" for other in others]
    assert first.env == 0


@pytest.mark.parametrize(
    "error",
    [
        HostError(Place(2), ValueError("bad")),
        DeviceFailed("gone"),
        SharedBatchError("no batch"),
        RankFailed("rank 1"),
        RankLost(1, "is gone", hangs=False),
        OSError(28, "No space left on device"),
        torch.OutOfMemoryError("too large"),
        RuntimeError("DataLoader worker (pid 3) exited unexpectedly"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_hosts_data_devices_and_ranks_need_no_traceback(
    error: Exception,
) -> None:
    assert is_expected(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("worker"), ValueError("shapes"), KeyError("x"), KeyboardInterrupt()],
)
def test_any_other_error_needs_its_traceback(error: BaseException) -> None:
    assert not is_expected(error)
