"""Hosts that are trained in processes, each with some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch import multiprocessing as processes


class Training(Protocol):
    """Hosts that are trained epoch by epoch."""

    def epoch(self) -> object:
        """Trains every host for an epoch."""

    def close(self) -> None: ...


class Processes:
    """Hosts spread over processes; close them at the end.

    Args:
        makers: one for each process, which makes its hosts there; processes import it by its name.
        threads: number of threads inside an operator.
    """

    def __init__(self, makers: Sequence[Callable[[], Training]], threads: int = 1) -> None:
        context = processes.get_context("spawn")
        self.links: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for make in makers:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, threads), daemon=True)
            process.start()
            self.links.append(ours)
            self.processes.append(process)
        for link in self.links:
            link.recv()  # it is ready

    def epoch(self) -> list[Any]:
        """Trains every host for an epoch; returns the result of each process."""
        for link in self.links:
            link.send(True)
        return [link.recv() for link in self.links]

    def close(self) -> None:
        for link in self.links:
            link.send(False)
        for process in self.processes:
            process.join()


def shares(hosts: int, processes: int) -> list[int]:
    """Returns the number of hosts of each process that has any; they are dealt out in turns."""
    counts = [len(range(number, hosts, processes)) for number in range(processes)]
    return [count for count in counts if count]


def _serve(link: Connection, make: Callable[[], Training], threads: int) -> None:
    """Trains an epoch for each True that comes."""
    torch.set_num_threads(threads)
    with closing(make()) as hosts:
        link.send(True)
        while link.recv():
            link.send(hosts.epoch())
