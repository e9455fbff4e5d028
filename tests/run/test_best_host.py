"""The best host of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from esper.env.vector_env import GrowthVectorEnv
from esper.run import checkpointing
from esper.run.checkpointing import BestHost


@pytest.mark.trap(24)
def test_the_best_host_is_chosen_by_validation_and_never_by_test_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(
        checkpointing, "export", lambda network, stem, facts: saved.append(facts)
    )
    monkeypatch.setattr(checkpointing, "committed_network", lambda training: training)
    monkeypatch.setattr(
        GrowthVectorEnv, "host", lambda self, env: SimpleNamespace(episode=env)
    )
    env: Any = GrowthVectorEnv.__new__(GrowthVectorEnv)
    env.config = SimpleNamespace(run=SimpleNamespace(seed=0))
    best = BestHost(tmp_path, env)
    rounds = [
        ([20.0, 90.0], [99.0, 1.0]),
        ([95.0, 10.0], [2.0, 98.0]),
        ([50.0, 60.0], [100.0, 100.0]),
    ]
    for validation, test in rounds:
        played: Any = SimpleNamespace(
            stats=SimpleNamespace(committed=np.array(validation)),
            tests=[np.array(test)],
        )
        best.offer(played)
    assert [
        (facts["env"], facts["validation_accuracy"], facts["test_accuracy"])
        for facts in saved
    ] == [
        (1, 90.0, 1.0),
        (0, 95.0, 2.0),
    ]
