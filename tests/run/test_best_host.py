"""The best host of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.run.experiment import Experiment
from tests.run.interrupted_runs import interrupted
from tests.run.run_helpers import (
    Does,
    stable_log,
    stop,
    tiny,
    within_round,
)


@pytest.mark.trap(30)
def test_the_best_host_of_the_time_before_is_not_replaced_by_a_worse_one(tmp_path: Path) -> None:
    config = tiny("none", rounds=3, seed=8)
    interrupted(config, tmp_path / "r", Does(within_round(3), stop))
    best = {name: (tmp_path / "r" / name).read_bytes() for name in ("best_host.json", "best_host.safetensors")}
    Experiment.resume(tmp_path / "r").run()
    assert {name: (tmp_path / "r" / name).read_bytes() for name in best} == best
    last = [e["committed_accuracy"] for e in stable_log(tmp_path / "r") if e["event"] == "EpisodeCompleted"][-2:]
    assert max(last) < json.loads(best["best_host.json"])["validation_accuracy"]  # round 3 had no better one
