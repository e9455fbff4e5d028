"""A rank: its hosts, its workers, its device."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from esper import _runtime
from esper.config import RunConfig
from esper.training.execution.ranks import RunRanks
from esper.training.executor import RankLost


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


def test_a_process_that_was_started_alone_has_no_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with RunRanks.joined() as ranks:
        assert ranks is None


@pytest.mark.parametrize(
    ("said", "words", "hangs"),
    [
        (
            "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 3 ms\nConnection reset",
            "rank 2 is gone: its connection was closed",
            False,
        ),
        (
            "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 3 ms\nTimed out waiting",
            r"rank 1 did not answer for 0\.5 minutes",
            True,
        ),
        ("Connection closed by peer", "another rank is gone", False),
    ],
)
def test_a_rank_that_is_gone_or_silent_is_named_before_anything_is_sent_to_it(
    said: str, words: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for what is sent to a rank that has just ended may never return; a monitored barrier does."""

    def barrier(_group: object, timeout: timedelta) -> None:
        assert timeout == timedelta(minutes=0.5)
        raise RuntimeError(said)

    monkeypatch.setattr(dist, "monitored_barrier", barrier)
    monkeypatch.setattr(
        dist, "scatter_object_list", lambda *_, **__: pytest.fail("sent")
    )
    ranks = RunRanks(0, 3, timeout=timedelta(minutes=0.5))
    for _ in range(2):  # also the next call
        with pytest.raises(RankLost, match=words) as lost:
            ranks.start({1: (print,)})
    assert lost.value.hangs is hangs
    ranks.dismiss()  # sends nothing
