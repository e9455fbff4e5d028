"""Hosts in processes: how they are dealt out, and that each process trains its own."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial

import pytest

from esper.bench.processes import Processes, shares


@dataclass
class Counts:
    """Counts its epochs."""

    number: int
    epochs: int = 0

    def epoch(self) -> tuple[int, int]:
        self.epochs += 1
        return self.number, self.epochs

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("hosts", "processes", "expected"),
    [(4, 2, [2, 2]), (3, 2, [2, 1]), (1, 2, [1]), (2, 4, [1, 1])],
)
def test_hosts_are_dealt_out_in_turns(
    hosts: int, processes: int, expected: list[int]
) -> None:
    assert shares(hosts, processes) == expected


def test_each_process_trains_its_own_hosts() -> None:
    with closing(Processes([partial(Counts, 7), partial(Counts, 8)])) as spread:
        assert spread.epoch() == [(7, 1), (8, 1)]
        assert spread.epoch() == [(7, 2), (8, 2)]
    assert [process.exitcode for process in spread.processes] == [0, 0]
