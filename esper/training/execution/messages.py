"""Messages between the processes of a run, by gloo."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT_MINUTES = 30.0
"""Time that a rank may take to answer, unless the command says otherwise."""


class RankLost(RuntimeError):
    """A rank does not answer any more."""

    def __init__(self, rank: int, why: str, hangs: bool) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank = rank
        self.hangs = hangs
        """Whether the rank is there but was silent for too long."""


@dataclass
class Messages:
    """Plain values and arrays, sent to and received from other ranks.

    If a rank ends, gloo reports that to whoever waits for a message from it, but not always to whoever waits until one
    is sent: the second of two sends can wait forever. So call :meth:`expect` before :meth:`send`, and wait for the
    answer only.
    """

    timeout: timedelta = timedelta(minutes=TIMEOUT_MINUTES)
    group: dist.ProcessGroup | None = None
    lost: RankLost | None = None
    """The reason that no rank can be called any more."""
    bytes: int = 0
    """Bytes sent and received so far."""
    _expected: dict[int, tuple[Tensor, dist.Work]] = field(default_factory=dict)
    """Lengths of messages that are on their way here, by rank."""
    _sent: dict[int, list[dist.Work]] = field(default_factory=dict)
    """The last message to each rank; gloo forgets what nobody holds before it is sent."""

    def expect(self, rank: int) -> None:
        """Prepares for a message from a rank."""
        size = torch.zeros(1, dtype=torch.int64)
        with self._talking_to(rank):
            arrival = _work(dist.irecv(size, rank, group=self.group))
            self._expected[rank] = size, arrival

    def send(self, message: Any, rank: int) -> None:
        """Starts to send a message to a rank."""
        content = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        size = torch.tensor([len(content)])  # goes first, so that the rank can make room
        with self._talking_to(rank):
            self._sent[rank] = [_work(dist.isend(part, rank, group=self.group)) for part in (size, content)]
        self.bytes += len(content)

    def flush(self, rank: int) -> None:
        """Waits until the last message to a rank is sent; only for the last one of all, which nobody answers."""
        with self._talking_to(rank):
            for work in self._sent[rank]:
                work.wait(self.timeout)

    def receive(self, rank: int, timeout: timedelta | None = None) -> Any:
        """Waits for the message that :meth:`expect` has prepared for.

        Raises RankLost if the rank is gone, or has not sent it within ``timeout`` (by default that of all messages).
        """
        with self._talking_to(rank):
            size, arrival = self._expected.pop(rank)
            arrival.wait(timeout or self.timeout)
            content = torch.empty(int(size), dtype=torch.uint8)
            _work(dist.irecv(content, rank, group=self.group)).wait(self.timeout)
        self.bytes += len(content)
        return pickle.loads(content.numpy().tobytes())

    @contextmanager
    def _talking_to(self, rank: int) -> Iterator[None]:
        """Converts errors of the connection to RankLost."""
        if self.lost is not None:
            raise self.lost
        try:
            yield
        except RuntimeError as error:
            hangs = "timed out" in str(error).lower()
            why = "is gone: its connection was closed"
            if hangs:
                minutes = self.timeout.total_seconds() / 60
                why = f"did not answer for {minutes:g} minutes"
            self.lost = RankLost(rank, why, hangs)
            raise self.lost from error


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ValueError("this process is outside the group of the run's ranks")
    return work
