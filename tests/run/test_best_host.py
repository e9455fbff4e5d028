"""The best host of a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.run.interrupted_runs import interrupted

from esper.env.vector_env import GrowthVectorEnv
from esper.run import checkpointing
from esper.run.checkpointing import BestHost
from esper.run.experiment import Experiment
from tests.run.run_helpers import (
    Does,
    stable_log,
    stop,
    tiny,
    within_round,
)


@pytest.mark.trap(30)
def test_the_best_host_of_the_time_before_is_not_replaced_by_a_worse_one(
    tmp_path: Path,
) -> None:
    config = tiny("none", rounds=3, seed=8)
    interrupted(config, tmp_path / "r", Does(within_round(3), stop))
    best = {
        name: (tmp_path / "r" / name).read_bytes()
        for name in ("best_host.json", "best_host.safetensors")
    }
    Experiment.resume(tmp_path / "r").run()
    assert {name: (tmp_path / "r" / name).read_bytes() for name in best} == best
    last = [
        e["committed_accuracy"]
        for e in stable_log(tmp_path / "r")
        if e["event"] == "EpisodeCompleted"
    ][-2:]
    assert (
        max(last) < json.loads(best["best_host.json"])["validation_accuracy"]
    )  # round 3 had no better one


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
