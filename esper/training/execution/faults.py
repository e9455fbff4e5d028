"""Which errors of training say enough without a traceback."""

from __future__ import annotations

from esper.data.shared_batches import SharedBatchError, worker_died
from esper.training.execution.messages import RankLost
from esper.training.execution.ranks import RankFailed
from esper.training.executor import DeviceFailed, HostError
from esper.training.micro_batching import ran_out


def is_expected(error: BaseException) -> bool:
    """Whether the error's message says enough without a traceback, which whoever fixes any other error needs.

    Expected are errors of a host in training, a GPU, data, a disk, memory or another rank.
    """
    if isinstance(error, HostError | DeviceFailed | SharedBatchError | RankFailed | RankLost | OSError):
        return True
    return worker_died(error) or ran_out(error)
