"""Ranks: the processes that train the hosts of one run, started by torchrun or by ``esper run --processes``.

Rank 0 calls and the others answer. What they send each other are arrays and plain values of the CPU, so the backend is
gloo also if hosts train on GPUs: their weights stay where they are.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from esper import _runtime
from esper.config import ConfigError, RunConfig

Floats = NDArray[np.float64]
TIMEOUT_MINUTES = 30.0
"""Time that a rank may take to answer, unless the command says otherwise."""
JOINING_MINUTES = 5.0
"""Least time that a rank has to join the others."""
PATIENCE = timedelta(days=1000)
"""Time that a rank waits for its next call: rank 0 has work of its own. If rank 0 is gone, so is the connection."""
END = "end"
"""Message after which the other ranks are done, and their answer to it."""


class RankLost(RuntimeError):
    """A rank does not answer any more."""

    def __init__(self, rank: int, why: str, hangs: bool) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank, self.hangs = rank, hangs
        """``hangs``: whether the rank is there but was silent for too long."""


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
    timeout: timedelta = timedelta(minutes=TIMEOUT_MINUTES)
    group: dist.ProcessGroup | None = None
    lost: RankLost | None = None
    """Why no rank can be called any more."""
    called: tuple[int, ...] = ()
    """Ranks that have not answered yet."""
    made: int = 0
    """Number of names given out by :meth:`new_name`."""
    bytes: int = 0
    """Bytes sent and received so far."""
    seconds: float = 0.0
    """Seconds between calls and their last answers so far, on rank 0."""
    idle: list[float] = field(default_factory=list)
    """How many of these seconds each rank only waited, on rank 0."""
    whole: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes the context in which rank 0 talks: one that defers signals, or an interrupt would cut a message in two."""
    parent: int = field(default_factory=os.getppid)
    _since: float = 0.0
    _expected: dict[int, tuple[Tensor, dist.Work]] = field(default_factory=dict)
    """Lengths of messages that are on their way here, by rank."""
    _sent: dict[int, list[dist.Work]] = field(default_factory=dict)
    """The last message to each rank; gloo forgets what nobody holds before it is sent."""

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
        own, joining = not dist.is_initialized(), timedelta(minutes=max(timeout_minutes, JOINING_MINUTES))
        if own:
            dist.init_process_group("gloo", timeout=joining)
        ranks = cls(
            dist.get_rank(),
            size,
            int(os.environ.get("LOCAL_RANK", 0)),
            int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            timedelta(minutes=timeout_minutes),
            None if own else dist.new_group(backend="gloo", timeout=joining),
        )
        try:
            yield ranks
        finally:
            ranks.dismiss()
            if own:
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
        rank = self.rank if rank is None else rank
        size, more = divmod(count, self.size)
        first = rank * size + min(rank, more)
        return range(first, first + size + (rank < more))

    def own(self, run: RunConfig) -> RunConfig:
        """Returns the lanes and the device of this rank: cores and devices are divided among those of a machine."""
        lanes = run.lanes or max(1, _runtime.physical_cores() // self.local_size)
        devices = run.device.split(",")
        return run.model_copy(update={"lanes": lanes, "device": devices[self.local_rank % len(devices)].strip()})

    def check(self, hosts: int) -> None:
        """Raises ConfigError if there are more ranks than hosts in a round."""
        if self.size > hosts:
            raise ConfigError(f"a round has {hosts} hosts (env.n_envs) for {self.size} ranks: use at most {hosts}")

    def new_name(self) -> int:
        self.made += 1
        return self.made

    def start(self, calls: Mapping[int, tuple[Any, ...]]) -> None:
        """Sends each of these ranks its call and returns. Raises as :meth:`finish` does, for the call before."""
        self.finish()
        self._since = perf_counter()
        with self.whole():
            for rank, call in calls.items():
                self._expect(rank)
                self._send(call, rank)
                self.called += (rank,)

    def finish(self) -> dict[int, Any]:
        """Waits for the answers to the last call and returns them by rank.

        Raises:
            RankFailed: a rank raised an error (the first one's is reported), after all have answered.
            ConfigError: likewise, if that is what the rank raised.
            RankLost: a rank is gone or does not answer in time.
        """
        answers: dict[int, Any] = {}
        failed: Exception | None = None
        busy, asked = dict[int, float](), perf_counter()
        with self.whole():
            while self.called:
                rank, *others = self.called
                succeeded, answer, busy[rank] = self._receive(rank, self.timeout)
                self.called = tuple(others)
                if succeeded:
                    answers[rank] = answer
                else:
                    failed = failed or _error_of(rank, *answer)
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
        self._expect(0)
        while (call := self._receive(0, PATIENCE)) != END:
            began = perf_counter()
            try:
                answer = (True, handle(*call))
            except Exception as error:
                answer = (False, _described(error, expected(error)))
            self._expect(0)
            self._send((*answer, perf_counter() - began), 0)
        self._send(END, 0)
        for work in self._sent[0]:
            work.wait(self.timeout)

    def dismiss(self) -> None:
        """Ends :meth:`serve` of all other ranks, once they have finished what they do; rank 0 calls it last."""
        if not self.first or self.lost is not None:
            return
        with suppress(RankFailed, RankLost, ConfigError):
            self.finish()
        with suppress(RankLost):
            for rank in range(1, self.size):
                self._expect(rank)
                self._send(END, rank)
            for rank in range(1, self.size):
                self._receive(rank, self.timeout)

    def _count(self, busy: Mapping[int, float]) -> None:
        """Adds a call that has been answered; ``busy`` are the seconds that ranks worked, by rank."""
        wall = perf_counter() - self._since
        self.seconds += wall
        self.idle = self.idle or [0.0] * self.size
        for rank in range(self.size):
            self.idle[rank] += max(0.0, wall - busy.get(rank, 0.0))

    def _expect(self, rank: int) -> None:
        """Prepares for a message from a rank; call this before sending what it answers.

        If a rank ends, gloo reports that to whoever waits for a message from it, but not always to whoever waits until
        one is sent (the second of two sends can wait forever). So only messages that are expected are waited for.
        """
        size = torch.zeros(1, dtype=torch.int64)
        with self._talking_to(rank):
            self._expected[rank] = size, _work(dist.irecv(size, rank, group=self.group))

    def _send(self, message: Any, rank: int) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        with self._talking_to(rank):
            parts = (torch.tensor([len(content)]), content)
            self._sent[rank] = [_work(dist.isend(part, rank, group=self.group)) for part in parts]
        self.bytes += len(content)

    def _receive(self, rank: int, timeout: timedelta) -> Any:
        """Waits for the message that :meth:`_expect` has prepared for."""
        with self._talking_to(rank):
            size, arrival = self._expected.pop(rank)
            arrival.wait(timeout)
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
            minutes = self.timeout.total_seconds() / 60
            silent, gone = f"did not answer for {minutes:g} minutes", "is gone: its connection was closed"
            self.lost = RankLost(rank, silent if hangs else gone, hangs)
            raise self.lost from error


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # it is None only in a process outside the group
    return work


def joint_seconds(ranks: RunRanks | None) -> Floats:
    """Returns the seconds of joint work so far, followed by how many of them each rank only waited; [] without ranks.

    Differences of two calls are those of the time between.
    """
    return np.array([] if ranks is None else [ranks.seconds, *(ranks.idle or [0.0] * ranks.size)])


def _described(error: Exception, expected: bool) -> tuple[str, bool]:
    """Returns the message about an error that rank 0 receives, and whether the config caused it."""
    if isinstance(error, ConfigError) or expected:
        return str(error), isinstance(error, ConfigError)
    return "".join(traceback.format_exception(error)), False


def _error_of(rank: int, words: str, invalid: bool) -> Exception:
    return ConfigError(f"rank {rank}: {words}") if invalid else RankFailed(f"rank {rank}: {words}")
