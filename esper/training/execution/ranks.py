"""Ranks: the processes that train the hosts of one run, started by torchrun or by ``esper run --processes``.

Rank 0 calls and the others answer. What they send each other are arrays and plain values of the CPU, so the backend is
gloo also if hosts train on GPUs: their weights stay where they are.
"""

from __future__ import annotations

import os
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
from esper.training.execution.messages import TIMEOUT_MINUTES, Messages, RankLost

Floats = NDArray[np.float64]
JOINING_MINUTES = 5.0
"""Least time that a rank has to join the others."""
PATIENCE = timedelta(days=1000)
"""Time that a rank waits for its next call: rank 0 has work of its own. If rank 0 is gone, so is the connection."""
END = "end"
"""Message after which the other ranks are done, and their answer to it."""


class RankFailed(RuntimeError):
    """An error that another rank raised; the message names the rank, and has its traceback if it was a surprise."""


@dataclass
class RunRanks:
    """This process among the ranks of a run; rank 0 is the one that decides, logs and saves.

    At most one call is under way at a time. Its answers are collected by :meth:`finish`, at the latest before the next.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    """Number of this rank among those of this machine, and their number."""
    messages: Messages = field(default_factory=Messages)
    called: tuple[int, ...] = ()
    """Ranks that have not answered yet."""
    names: int = 0
    """Number of names given out by :meth:`new_name`."""
    seconds: float = 0.0
    """Seconds between calls and their last answers so far, on rank 0."""
    idle: list[float] = field(default_factory=list)
    """The part of these seconds that each rank only waited, on rank 0."""
    whole: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes the context in which rank 0 talks: one that defers signals, or an interrupt would cut a message in two."""
    parent: int = field(default_factory=os.getppid)
    _since: float = 0.0

    @classmethod
    @contextmanager
    def joined(cls, timeout_minutes: float = TIMEOUT_MINUTES) -> Iterator[RunRanks | None]:
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
            Messages(timedelta(minutes=timeout_minutes), group),
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

    def check(self, hosts: int) -> None:
        """Raises ConfigError if there are more ranks than hosts in a round."""
        if self.size > hosts:
            raise ConfigError(f"a round has {hosts} hosts (env.n_envs) for {self.size} ranks: use at most {hosts}")

    def new_name(self) -> int:
        """Returns a name for a group of hosts."""
        self.names += 1
        return self.names

    def start(self, calls: Mapping[int, tuple[Any, ...]]) -> None:
        """Sends each of these ranks its call and returns. Raises as :meth:`finish` does, for the call before."""
        self.finish()
        self._since = perf_counter()
        with self.whole():
            for rank, call in calls.items():
                self.messages.expect(rank)  # before it is sent, see Messages
                self.messages.send(call, rank)
                self.called += (rank,)

    def finish(self) -> dict[int, Any]:
        """Waits for the answers to the last call and returns them by rank.

        Raises:
            RankFailed: a rank raised an error (the first one's is reported), after all have answered.
            ConfigError: likewise, if that is what the rank raised.
            RankLost: a rank is gone or does not answer in time.
        """
        answers = {}
        failed: Exception | None = None
        busy = {}
        asked = perf_counter()
        with self.whole():
            while self.called:
                rank, *others = self.called
                kind, answer, busy[rank] = self.messages.receive(rank)
                self.called = tuple(others)
                if kind is None:
                    answers[rank] = answer
                elif failed is None:  # raised when all have answered
                    failed = kind(f"rank {rank}: {answer}")

        if busy:
            self._count({0: asked - self._since, **busy})
        if failed is not None:
            raise failed
        return answers

    def serve(self, handle: Callable[..., Any], expected: Callable[[Exception], bool]) -> None:
        """Answers the calls of rank 0 by ``handle`` until it dismisses this rank.

        An error of ``handle`` is the answer; with its traceback unless it is ``expected``. Raises RankLost if rank 0 is
        gone.
        """
        self.messages.expect(0)
        while True:
            call = self.messages.receive(0, PATIENCE)
            if call == END:
                break
            began = perf_counter()
            kind: type[Exception] | None = None
            try:
                answer = handle(*call)
            except ConfigError as error:
                kind = ConfigError
                answer = str(error)
            except Exception as error:
                kind = RankFailed
                answer = str(error) if expected(error) else "".join(traceback.format_exception(error))
            self.messages.expect(0)
            self.messages.send((kind, answer, perf_counter() - began), 0)
        self.messages.send(END, 0)
        self.messages.flush(0)

    def dismiss(self) -> None:
        """Ends :meth:`serve` of all other ranks, once they have finished what they do; rank 0 calls it last."""
        if not self.first or self.messages.lost is not None:
            return
        with suppress(RankFailed, RankLost, ConfigError):
            self.finish()
        with suppress(RankLost):
            for rank in range(1, self.size):
                self.messages.expect(rank)
                self.messages.send(END, rank)
            for rank in range(1, self.size):
                self.messages.receive(rank)

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
