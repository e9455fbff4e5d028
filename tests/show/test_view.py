"""The state of a run, folded from its events: the time that is left by a log."""

from __future__ import annotations

import pytest

from esper.show.view import RunView
from esper.telemetry.event import ArmPlayed, Event, RunResumed
from tests.telemetry.sample_events import completed, epoch, started

RESUMED = RunResumed(
    round=7,
    rounds=10,
    n_envs=8,
    episode_length=30,
    tier=None,
    tier_refused=None,
    time=0.0,
)


def seen(*events: Event) -> RunView:
    view = RunView()
    for event in events:
        view.handle(event)
    return view


def test_the_time_left_is_estimated_from_the_mean_round() -> None:
    assert (
        seen(completed(1), completed(2)).pace.seconds_left() == 120.0
    )  # 10 s and 20 s seen, 8 rounds to come at 15 s
    assert seen(completed(1), completed(2), completed(10)).pace.seconds_left() == 0.0


def test_the_part_of_a_round_that_is_done_is_not_left() -> None:
    """All eight hosts have done 15 of 30 epochs in round 4 of 10."""
    view = seen(
        started(rounds=10),
        completed(3),
        *(epoch(env, 15, episode=3) for env in range(8)),
    )
    assert view.part_of_round == 0.5
    assert view.pace.seconds_left() == pytest.approx(195.0)


def test_the_time_left_of_a_resumed_run_counts_its_own_rounds() -> None:
    """Rounds 1 to 7 were played by an earlier process, perhaps on another machine."""
    assert seen(RESUMED).done == 7
    assert seen(RESUMED).pace.seconds_left() is None
    assert (
        seen(RESUMED, completed(8)).pace.seconds_left() == 160.0
    )  # 80 s a round, 2 to come


def test_the_first_round_is_estimated_by_the_clock() -> None:
    now = 5.0
    view = RunView(clock=lambda: now)
    view.handle(started(rounds=10))
    assert view.pace.seconds_left() is None
    now = 15.0
    for env in range(8):
        view.handle(epoch(env, 15))
    assert view.pace.part == pytest.approx(0.05)
    assert view.pace.seconds_left() == pytest.approx(190.0)


def test_a_comparison_has_a_pace_of_its_own() -> None:
    now = 0.0
    view = RunView(clock=lambda: now)
    view.handle(started(rounds=10))
    now = 10.0
    view.handle(completed(10))
    left = []
    for number in (1, 2, 3, 1):  # the last is that of another training seed
        for arm in ("none", "ppo"):
            now += 3.0
            view.handle(ArmPlayed(arm, number, 3, 80.0))
            left.append(view.pace.seconds_left())
    assert left == [None, None, 9.0, 6.0, 3.0, 0.0, None, None]
