"""Ranks: the processes that train the hosts of one run, started by torchrun or by ``esper run --processes``.

Rank 0 calls functions on the other ranks by torch's object collectives. All ranks take part in every exchange, whether
they are called or not. What they exchange are arrays and plain values of the CPU, so the backend is gloo also if hosts
train on GPUs: their weights stay where they are.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from esper.config import ConfigError, RunConfig
from esper.training.execution.cores import usable_cores
from esper.training.executor import RankFailed, RankLost, is_expected

Floats = NDArray[np.float64]
Call = tuple[Callable[..., Any], *tuple[Any, ...]]
"""A function that pickle can name, and its arguments after the first, which is the server of the rank."""

JOINING_MINUTES = 5.0
"""Least time that a rank has to join the others."""
PATIENCE = timedelta(days=1000)
"""Time that a rank waits for its next call: rank 0 has work of its own. If rank 0 is gone, so is the connection."""
END = "end"
"""Sent in place of a call when the other ranks are done."""


@dataclass
class RunRanks:
    """This process among the ranks of a run; rank 0 is the one that decides, logs and saves.

    At most one call is under way at a time. Its replies are collected by :meth:`finish`, at the latest before the next.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    """Number of this rank among those of this machine, and their number."""
    timeout: timedelta = timedelta(minutes=30)
    """Time that a rank may take to reply."""
    group: dist.ProcessGroup | None = None
    lost: RankLost | None = None
    """The reason that no rank can be called any more."""
    called: tuple[int, ...] = ()
    """Ranks whose replies are not collected yet."""
    names: int = 0
    """Number of names given out by :meth:`new_name`."""
    seconds: float = 0.0
    """Seconds between calls and their last replies so far, on rank 0."""
    idle: list[float] = field(default_factory=list)
    """The part of these seconds that each rank only waited, on rank 0."""
    whole: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes the context in which rank 0 talks: one that defers signals, which would cut an exchange in two."""
    parent: int = field(default_factory=os.getppid)
    _since: float = 0.0

    @classmethod
    @contextmanager
    def joined(cls, timeout_minutes: float = 30.0) -> Iterator[RunRanks | None]:
        """Joins the other ranks; None if this process was not started as one of several.

        At the end of the block rank 0 dismisses the others.
        """
        size = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
        if size == 1:
            yield None
            return

        joining = timedelta(minutes=max(timeout_minutes, JOINING_MINUTES))
        # An existing process group is the caller's, and may be of another backend.
        starts = not dist.is_initialized()
        if starts:
            dist.init_process_group("gloo", timeout=joining)
            group = None
        else:
            group = dist.new_group(backend="gloo", timeout=joining)
        ranks = cls(
            dist.get_rank(),
            size,
            int(os.environ.get("LOCAL_RANK", 0)),
            int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            timedelta(minutes=timeout_minutes),
            group,
        )
        try:
            yield ranks
        finally:
            ranks.dismiss()
            if starts:
                dist.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def orphaned(self) -> bool:
        """True once the process that started this one is gone."""
        return os.getppid() != self.parent

    def share(self, count: int, rank: int | None = None) -> range:
        """Returns which of ``count`` hosts a rank has (this one by default): a contiguous part, in the order of ranks.

        The sizes of the parts differ by at most 1; the first ones are larger.
        """
        if rank is None:
            rank = self.rank
        size, larger = divmod(count, self.size)
        first = rank * size + min(rank, larger)
        if rank < larger:
            size += 1
        return range(first, first + size)

    def own(self, run: RunConfig) -> RunConfig:
        """Returns the workers and the device of this rank: cores and devices are divided among those of a machine."""
        workers = run.lanes or max(1, usable_cores() // self.local_size)
        devices = run.device.split(",")
        device = devices[self.local_rank % len(devices)].strip()
        return run.model_copy(update={"lanes": workers, "device": device})

    def new_name(self) -> int:
        """Returns a name for a group of hosts."""
        self.names += 1
        return self.names

    def start(self, calls: Mapping[int, Call]) -> None:
        """Sends each of these ranks its call and returns. Raises as :meth:`finish` does, for the call before."""
        self.finish()
        self._since = perf_counter()
        if not calls:
            return
        with self.whole():
            self._exchange_calls([calls.get(rank) for rank in range(self.size)])
            self.called = tuple(calls)

    def finish(self) -> dict[int, Any]:
        """Waits for the replies to the last call and returns the results by rank.

        Raises:
            RankFailed: a rank raised an error (the first one's is reported), after all have replied.
            ConfigError: likewise, if that is what the rank raised.
            RankLost: a rank is gone or does not reply in time.
        """
        if not self.called:
            return {}
        asked = perf_counter()
        with self.whole():
            called = self.called
            self.called = ()
            replies = self._exchange_replies(None)

        results = {}
        busy = {0: asked - self._since}
        failed: Exception | None = None
        for rank in called:
            kind, result, busy[rank] = replies[rank]
            if kind is None:
                results[rank] = result
            elif failed is None:
                failed = kind(f"rank {rank}: {result}")
        self._count(busy)
        if failed is not None:
            raise failed
        return results

    def serve(self, server: object) -> None:
        """Executes the calls of rank 0, with ``server`` as first argument, until it dismisses this rank.

        The error of a call is the reply; with its traceback unless it is expected. Raises RankLost if rank 0 is gone.
        """
        while True:
            call = self._exchange_calls(None)
            if call == END:
                break
            self._exchange_replies(None if call is None else _reply(server, *call))

    def dismiss(self) -> None:
        """Ends :meth:`serve` of all other ranks, once they have finished what they do; rank 0 calls it last."""
        if not self.first or self.lost is not None:
            return
        with suppress(RankFailed, RankLost, ConfigError):
            self.finish()
        with suppress(RankLost):
            self._exchange_calls([END] * self.size)

    def _exchange_calls(self, calls: list[Any] | None) -> Any:
        """Sends ``calls`` by rank from rank 0, which alone has them; returns that of this rank."""
        received = [None]
        with self._meeting():
            dist.scatter_object_list(received, calls, src=0, group=self.group)
        return received[0]

    def _exchange_replies(self, reply: Any) -> list[Any]:
        """Sends the reply of each rank to rank 0; returns all of them there."""
        replies: list[Any] = [None] * self.size
        with self._meeting():
            dist.gather_object(reply, replies if self.first else None, dst=0, group=self.group)
        return replies

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Waits for all ranks before the block; converts errors of the connection to RankLost.

        Of all operations of gloo, only the monitored barrier names the rank that is missing, and it finds one that has
        ended without sending to it: the second of two sends to such a rank may wait forever.
        """
        if self.lost is not None:
            raise self.lost
        try:
            dist.monitored_barrier(self.group, self.timeout if self.first else PATIENCE)
            yield
        except RuntimeError as error:
            named = re.search(r"Rank (\d+) failed to pass", str(error))
            rank = int(named[1]) if named else None
            if self.size == 2:
                rank = 1 - self.rank
            elif not self.first:
                rank = 0
            hangs = "timed out" in str(error).lower()
            why = "is gone: its connection was closed"
            if hangs:
                minutes = self.timeout.total_seconds() / 60
                why = f"did not answer for {minutes:g} minutes"
            self.lost = RankLost(rank, why, hangs)
            raise self.lost from error

    def _count(self, busy: Mapping[int, float]) -> None:
        """Adds a call that has been answered; ``busy`` are the seconds that ranks worked, by rank."""
        wall = perf_counter() - self._since
        self.seconds += wall
        self.idle = self.idle or [0.0] * self.size
        for rank in range(self.size):
            self.idle[rank] += max(0.0, wall - busy.get(rank, 0.0))


def joint_seconds(ranks: RunRanks | None) -> Floats:
    """Returns the seconds of joint work so far, followed by how many of them each rank only waited; [] without ranks.

    Differences of two calls are those of the time between.
    """
    if ranks is None:
        return np.array([])
    idle = ranks.idle or [0.0] * ranks.size
    return np.array([ranks.seconds, *idle])


def _reply(
    server: object,
    function: Callable[..., Any],
    *arguments: Any,
) -> tuple[type[Exception] | None, Any, float]:
    """Executes a call; returns the type of its error, its result or the text of the error, and the seconds it took."""
    began = perf_counter()
    kind: type[Exception] | None = None
    try:
        result = function(server, *arguments)
    except ConfigError as error:
        kind = ConfigError
        result = str(error)
    except Exception as error:
        kind = RankFailed
        result = str(error) if is_expected(error) else "".join(traceback.format_exception(error))
    return kind, result, perf_counter() - began
