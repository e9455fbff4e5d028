"""Ranks for tests: rank 0 is the test's process, the others are processes of a fork server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from esper.env.rank_hosts import RankHosts, RankServer
from esper.env.training_backend import TrainingBackend
from esper.training.execution.ranks import RunRanks
from esper.training.executor import RankLost

SERVER = multiprocessing.get_context(
    "forkserver"
)  # a fork of the test would have its threads' locks without them
SERVER.set_forkserver_preload(["esper.env.rank_hosts"])


def kill(_hosts: RankHosts) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(_hosts: RankHosts) -> Any:
    time.sleep(600)


def fail(_hosts: RankHosts) -> Any:
    raise ValueError("this is the fault")


def break_a_host(hosts: RankHosts) -> Any:
    """Its first host cannot train: the executor's error names it."""
    hosts.hosts[0].training.host = None  # type: ignore[assignment]


def serve(
    environment: dict[str, str],
    minutes: float,
    fault: Callable[[RankHosts], Any] | None,
    epoch: int,
) -> None:
    """A rank that trains hosts; in its epoch with this number, counted from 1, it has the fault."""
    os.environ.update(environment)
    begun = 0
    train = TrainingBackend.train

    def faulty(hosts: RankHosts, *arguments: Any) -> None:
        nonlocal begun
        begun += 1
        if fault is not None and begun == epoch:
            fault(hosts)
        train(hosts, *arguments)

    TrainingBackend.train = faulty  # type: ignore[assignment, method-assign]
    with RunRanks.joined(minutes) as ranks:
        assert ranks is not None
        with suppress(RankLost):
            RankServer(ranks).serve()


@contextmanager
def ranks_of(
    size: int,
    fault: Callable[[RankHosts], Any] | None = None,
    rank: int = 1,
    epoch: int = 3,
    minutes: float = 5.0,
) -> Iterator[RunRanks | None]:
    """Yields this process as rank 0 of ``size`` ranks; None for a single one.

    ``rank`` has the ``fault`` in its ``epoch``.

    All others have ended when the block is over.
    """
    if size == 1:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
    }
    place["LOCAL_WORLD_SIZE"] = str(size)
    others = [
        SERVER.Process(
            target=serve,
            args=(
                {**place, "RANK": str(i), "LOCAL_RANK": str(i)},
                minutes,
                fault if i == rank else None,
                epoch,
            ),
        )
        for i in range(1, size)
    ]
    for other in others:
        other.start()
    try:
        with (
            patch.dict(os.environ, {**place, "RANK": "0", "LOCAL_RANK": "0"}),
            RunRanks.joined(minutes) as ranks,
        ):
            yield ranks
    finally:
        for other in others:
            if fault is hang:
                other.kill()
            other.join(60)
            assert other.exitcode is not None, "a rank is still there"
            assert other.exitcode == 0 or fault in (kill, hang), "a rank has failed"
