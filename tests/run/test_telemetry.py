"""Events of a run: the memory of each round, and the placement of copies at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.agents.controller import EnvView, PerEnvController
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.arrays import Ints
from esper.run.experiment import Experiment
from esper.telemetry.event import (
    AnomalyDetected,
    BaselineMeasured,
    EpochCompleted,
    PolicyUpdated,
    RoundCompleted,
    RunCompleted,
)
from esper.telemetry.memory import STATUS, by_kind
from esper.telemetry.record import stable_record
from tests.run.run_helpers import (
    Recorder,
    learned_state,
    learning,
    metrics,
    of_kind,
    play,
    stable_metrics,
    tiny,
)


class Forbidden(PerEnvController):
    """Keeps a seed that is not there."""

    def choose(self, env: int, view: EnvView) -> Ints:
        return self.spec.encode(Op.FOSSILIZE, "r0c0")


@pytest.mark.parametrize("controller", [Forbidden, "random"])
def test_illegal_actions_of_a_round_are_a_warning(
    tmp_path: Path, controller: Any
) -> None:
    config = TrainingConfig.parse(
        {
            "task": {"name": "planted"},
            "env": {"n_envs": 2, "episode_length": 8},
            "run": {"rounds": 2},
        }
    )
    recorder = Recorder()
    Experiment(
        config, tmp_path / "run", callbacks=[recorder], controller=controller
    ).run()
    found = [event for event in recorder.events if isinstance(event, AnomalyDetected)]
    if controller == "random":
        assert found == []
        return
    assert [event.round for event in found] == [1, 2]
    assert {event.found for event in found} == {
        "16 illegal actions in 16 epochs became WAIT; the first: "
        "FOSSILIZE was legal in no slot (host 0, epoch 0)"
    }


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")
def test_a_round_reports_the_memory_of_its_hosts_and_of_those_left_alone(
    tmp_path: Path,
) -> None:
    """Two hosts that grow and two that are left alone; each has two snapshots of 277 weights and momentum or more."""
    summary, recorder = play(tiny(), tmp_path / "run")
    rounds = [event for event in recorder.events if isinstance(event, RoundCompleted)]
    least = 2 * 2 * 4 * 277
    for event, row in zip(rounds, metrics(summary.folder), strict=True):
        assert set(event.memory) == {
            "copies/cpu",
            "copies_per_host/cpu",
            "resident/cpu",
        }
        assert event.memory["copies_per_host/cpu"] >= least
        assert (
            4 * least
            <= event.memory["copies/cpu"]
            <= 4 * event.memory["copies_per_host/cpu"]
        )
        assert event.memory["resident/cpu"] > 50 * 2**20
        for kind, held in by_kind(event.memory).items():
            assert int(row[f"memory/{kind}"]) == held


def test_a_round_reports_the_mean_of_the_needs_that_were_measured_last(
    tmp_path: Path,
) -> None:
    measured = tiny().with_values(env={"slots": ["r2"], "need_every": 1})
    for number, config in enumerate((measured, tiny())):
        summary, recorder = play(config, tmp_path / str(number))
        needs: dict[tuple[int, int], dict[str, float]] = {}
        rounds = []
        for event in recorder.events:
            if isinstance(event, EpochCompleted):
                needs[event.episode, event.env] = event.needs
            if isinstance(event, RoundCompleted):
                last = [list(of_host.values()) for of_host in needs.values()]
                known = np.concatenate(last)
                wanted = pytest.approx(known.mean()) if known.size else None
                assert event.need == wanted
                rounds.append(event.need)
                needs.clear()
        cells = [row["need"] for row in metrics(summary.folder)]
        assert cells == ["" if need is None else str(need) for need in rounds]
        assert (None in rounds) == (config is not measured)


KEPT = (BaselineMeasured, RoundCompleted, PolicyUpdated, RunCompleted)
"""Events of every level."""


def test_no_level_changes_a_bit_of_a_run(tmp_path: Path) -> None:
    config = learning(rounds=1)
    runs = []
    for level in ("normal", "minimal", "debug"):
        folder = tmp_path / level
        _, recorder = play(config.with_values(telemetry={"level": level}), folder)
        assert bool(of_kind(recorder, EpochCompleted)) == (level != "minimal")
        stable = [stable_record(e) for e in recorder.events if isinstance(e, KEPT)]
        runs.append((stable, learned_state(folder), stable_metrics(folder)))
    assert runs[1] == runs[0]
    assert runs[2] == runs[0]
