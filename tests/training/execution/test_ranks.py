"""A rank: its hosts, its workers, its device."""

from __future__ import annotations

import pytest

from esper import _runtime
from esper.config import ConfigError, RunConfig
from esper.training.execution.ranks import RunRanks


@pytest.mark.parametrize(
    ("hosts", "size", "sizes"),
    [(8, 2, [4, 4]), (8, 3, [3, 3, 2]), (2, 4, [1, 1, 0, 0]), (5, 5, [1] * 5)],
)
def test_hosts_are_divided_in_order_and_evenly(
    hosts: int, size: int, sizes: list[int]
) -> None:
    shares = [RunRanks(0, size).share(hosts, rank) for rank in range(size)]
    assert [len(share) for share in shares] == sizes
    assert [host for share in shares for host in share] == list(range(hosts))


def test_cores_are_divided_among_the_ranks_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_runtime, "physical_cores", lambda: 8)
    assert RunRanks(0, 3, local_size=3).own(RunConfig()).lanes == 2
    assert RunRanks(0, 16, local_size=16).own(RunConfig()).lanes == 1
    assert RunRanks(0, 8, local_size=4).own(RunConfig(lanes=3)).lanes == 3


def test_ranks_of_a_machine_take_its_devices_in_turn() -> None:
    run = RunConfig(device="cuda:0, cuda:1")
    found = [
        RunRanks(rank, 6, local_rank=rank % 3, local_size=3).own(run).device
        for rank in range(6)
    ]
    assert found == ["cuda:0", "cuda:1", "cuda:0"] * 2


def test_a_rank_without_hosts_is_refused() -> None:
    RunRanks(0, 2).check(2)
    with pytest.raises(
        ConfigError,
        match=r"a round has 2 hosts \(env.n_envs\) for 3 ranks: use at most 2",
    ):
        RunRanks(0, 3).check(2)


def test_a_process_that_was_started_alone_has_no_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with RunRanks.joined() as ranks:
        assert ranks is None
