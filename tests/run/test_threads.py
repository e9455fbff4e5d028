"""Threads that a run computes with."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.agents.ppo.normalization import (
    ObservationStatistics,
    RewardNormalizer,
    RunningMeanStd,
)
from esper.run.rollout import one_thread
from tests.run.run_helpers import learning, play


@pytest.mark.slow
@pytest.mark.finding("H4")
def test_only_the_agents_thread_uses_its_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts of the run train on two workers, each a thread of its own."""
    users: dict[str, set[int]] = {}

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            users.setdefault(name, set()).add(threading.get_ident())
            return method(*arguments)

        return call

    for kind in (RunningMeanStd, ObservationStatistics, RewardNormalizer):
        for name in {"merge", "update", "normalize", "state_dict"} & set(vars(kind)):
            monkeypatch.setattr(
                kind, name, noted(f"{kind.__name__}.{name}", vars(kind)[name])
            )
    play(learning(lanes=2), tmp_path / "run")
    assert {
        "ObservationStatistics.update",
        "ObservationStatistics.normalize",
        "RewardNormalizer.update",
    } <= set(users)
    assert set.union(*users.values()) == {threading.get_ident()}


def test_a_block_has_one_thread_and_the_number_before_comes_back_after_an_error() -> (
    None
):
    torch.set_num_threads(2)  # the fixture of this folder resets it
    with suppress(ValueError), one_thread():
        assert torch.get_num_threads() == 1
        raise ValueError("inside")
    assert torch.get_num_threads() == 2
