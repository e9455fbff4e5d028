"""Events of a run: the memory of each round, and the placement of copies at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.telemetry.event import RoundCompleted, RunStarted
from esper.telemetry.memory import STATUS, by_kind
from tests.run.run_helpers import metrics, of_kind, play, tiny


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")
def test_a_run_reports_its_pinned_copies_and_the_memory_of_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts that grow and two that are left alone; each has two snapshots of 277 weights and momentum or more."""
    monkeypatch.setattr("esper.env.vector_env.copies_to_pin", lambda *_arguments: 2)
    summary, recorder = play(tiny(max_device_copies_mib=1.0), tmp_path / "run")
    (started,) = of_kind(recorder, RunStarted)
    assert started.pinned_copies == ("older snapshots", "newest snapshots")
    (event,) = of_kind(recorder, RoundCompleted)
    (row,) = metrics(summary.folder)
    least = 2 * 2 * 4 * 277
    assert set(event.memory) == {"copies/cpu", "copies_per_host/cpu", "resident/cpu"}
    assert event.memory["copies_per_host/cpu"] >= least
    assert (
        4 * least
        <= event.memory["copies/cpu"]
        <= 4 * event.memory["copies_per_host/cpu"]
    )
    assert event.memory["resident/cpu"] > 50 * 2**20
    for kind, held in by_kind(event.memory).items():
        assert int(row[f"memory/{kind}"]) == held
