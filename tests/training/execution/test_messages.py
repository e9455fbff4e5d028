"""Messages between ranks; a rank that is gone is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from esper.training.execution.messages import RankLost
from esper.training.execution.ranks import RunRanks


class Waiting:
    """A request, as `isend` and `irecv` return it."""

    def __init__(self, wait: Callable[[], bool]) -> None:
        self.wait = lambda _timeout: wait()


def test_a_rank_that_ended_before_a_call_is_found_by_its_missing_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting for what is sent to a rank that has just ended may never return; waiting for its answer does."""
    order = []

    def gone() -> bool:
        raise RuntimeError("Connection closed by peer")

    def irecv(*_: Any, **__: Any) -> Waiting:
        order.append("expect")
        return Waiting(gone)

    def isend(*_: Any, **__: Any) -> Waiting:
        order.append("send")
        return Waiting(lambda: pytest.fail("waits until a message is sent"))

    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(dist, "isend", isend)
    ranks = RunRanks(0, 2)
    ranks.start({1: ("play",)})
    with pytest.raises(RankLost, match="rank 1 is gone: its connection was closed"):
        ranks.finish()
    assert order == ["expect", "send", "send"]
