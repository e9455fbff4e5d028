"""The state of a run in words."""

from __future__ import annotations

from esper.show import status
from esper.show.run_view import RunView
from esper.telemetry.event import WorthsEstimated
from tests.telemetry.sample_events import epoch, started


def view_of(*events: object) -> RunView:
    view = RunView()
    for event in events:
        view.handle(event)  # type: ignore[arg-type]
    return view


def test_the_accuracy_of_a_round_counts_hosts_that_have_ended() -> None:
    """Host 2 ended after epoch 3, host 0 goes on: 74 and 70 %."""
    view = view_of(started(), epoch(0, 3), epoch(2, 3), epoch(0, 4))
    _, lines = status.accuracy(view)
    assert lines == ["this round, epoch 4: validation accuracy 72.0 %, baseline 60.0 % (+12.0 pp)"]


def test_worths_are_those_of_seeds_that_were_kept() -> None:
    worths = {
        "r0c0": {"norm": (0.5, 0.3, 4), "guess": (3.5, 1.3, 0), "wide": (2.0, 0.4, 6)},
        "r0c1": {"a": (1.0, 1.0, 0)},
    }
    _, lines = status.worths(view_of(started(), WorthsEstimated(8, 64, 1.0, worths)))
    assert lines[0] == "r0c0: wide +2.0 pp ± 0.4 (kept 6x), norm +0.5 pp ± 0.3 (kept 4x)"
    assert len(lines) == 2  # the other one says what a worth is
    _, best = status.worths(view_of(started(), WorthsEstimated(8, 64, 1.0, worths)), most=1)
    assert best[0] == "r0c0: wide +2.0 pp ± 0.4 (kept 6x)"
