"""Events of a run: the memory of each round, and the placement of copies at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.telemetry.event import RoundCompleted
from esper.telemetry.memory import STATUS, by_kind
from tests.run.run_helpers import metrics, play, tiny


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
