"""Run folders: logs are cut back to the checkpoint, and what is missing from them is reported."""

from __future__ import annotations

from pathlib import Path

from esper.run.experiment import Experiment
from esper.telemetry.event import RunResumed
from tests.run.run_helpers import Does, Recorder, learning, round_ends, stop


def test_a_log_that_lost_its_end_is_reported(tmp_path: Path) -> None:
    config = learning("planted", n_envs=4, rounds=3)
    Experiment(config, tmp_path / "r", [Does(round_ends(2), stop)]).run()
    log = tmp_path / "r" / "events.jsonl"
    log.write_bytes(log.read_bytes()[:100])
    sink = Recorder()
    Experiment.resume(tmp_path / "r", [sink]).run()
    resumed = sink.events[0]
    assert isinstance(resumed, RunResumed)
    assert [
        "events.jsonl is missing its last" in warning for warning in resumed.warnings
    ] == [True]
