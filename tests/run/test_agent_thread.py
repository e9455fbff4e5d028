"""The thread that uses the running statistics of an agent."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.agents.ppo.normalization import (
    ObservationStatistics,
    RewardNormalizer,
    RunningMeanStd,
)
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
