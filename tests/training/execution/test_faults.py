"""Errors that are reported without a traceback."""

from __future__ import annotations

import pytest
import torch

from esper.data.shared_batches import SharedBatchError
from esper.training.execution.faults import is_expected
from esper.training.execution.messages import RankLost
from esper.training.execution.ranks import RankFailed
from esper.training.executor import DeviceFailed, HostError


class Place:
    index, epoch, batch = 2, 3, 4


@pytest.mark.parametrize(
    "error",
    [
        HostError(Place(), ValueError("bad")),
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
