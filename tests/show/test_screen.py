"""The sections of the view of a run."""

from __future__ import annotations

from esper.show import screen
from esper.show.view import RunView
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
    grown, alone = (line.plain for line in screen.accuracy(view, 80, screen.BLOCKS))
    assert grown.endswith(" 72.0 % grown, epoch 4, validation: +12.0 pp")
    assert alone.endswith(" 60.0 % without growth")


def test_worths_are_those_of_seeds_that_were_kept() -> None:
    worths = {
        "r0c0": {"norm": (0.5, 0.3, 4), "guess": (3.5, 1.3, 0), "wide": (2.0, 0.4, 6)},
        "r0c1": {"a": (1.0, 1.0, 0)},
    }
    lines = screen.worths(view_of(started(), WorthsEstimated(8, 64, 1.0, worths)))
    assert (
        lines[0] == "r0c0: wide +2.0 pp ± 0.4 (kept 6x), norm +0.5 pp ± 0.3 (kept 4x)"
    )
    assert len(lines) == 2  # the other one says what a worth is


def test_the_view_of_a_pipe_repeats_no_heading_and_has_no_empty_one() -> None:
    shown = screen.plain([("time", ["10 s", "20 s"]), ("memory", [])])
    assert shown == "time         10 s\n             20 s"
