"""The work of a run by phase, and the time that is left for all of it."""

from __future__ import annotations

import pytest

from esper.telemetry.workload import Phase, Workload


class Clock:
    """A clock that is set by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def workload(*phases: Phase) -> tuple[Workload, Clock]:
    clock = Clock()
    work = Workload(clock=clock)
    work.add(phases)
    return work, clock


def spend(
    work: Workload, clock: Clock, name: str, units: float, seconds: float
) -> None:
    clock.now += seconds
    work.advance(name, units)


def test_before_anything_is_measured_the_time_left_is_unknown() -> None:
    work, _ = workload(Phase("baseline", 10), Phase("rounds", 90))
    assert work.seconds_left() is None
    assert work.part == 0.0


def test_the_first_phase_tells_how_long_all_of_them_take() -> None:
    work, clock = workload(
        Phase("baseline", 10), Phase("rounds", 90), Phase("comparison", 100)
    )
    spend(work, clock, "baseline", 10, seconds=5.0)
    assert work.seconds_left() == pytest.approx(95.0)
    assert work.part == pytest.approx(0.05)


def test_time_is_left_until_the_last_phase_is_done() -> None:
    work, clock = workload(Phase("rounds", 100), Phase("comparison", 100))
    spend(work, clock, "rounds", 100, seconds=100.0)
    assert work.seconds_left() == pytest.approx(100.0)
    spend(work, clock, "comparison", 100, seconds=50.0)
    assert work.seconds_left() == 0.0
    assert work.part == 1.0


def test_a_phase_is_soon_judged_by_its_own_pace() -> None:
    work, clock = workload(Phase("baseline", 100), Phase("rounds", 1000))
    spend(work, clock, "baseline", 100, seconds=100.0)
    spend(work, clock, "rounds", 500, seconds=1500.0)
    assert work.seconds_left() == pytest.approx(1500.0, rel=0.1)


def test_a_known_pace_does_not_depend_on_that_of_hosts() -> None:
    work, clock = workload(Phase("baseline", 10), Phase("practice", 1000, guess=0.1))
    spend(work, clock, "baseline", 10, seconds=40.0)
    assert work.seconds_left() == pytest.approx(100.0)


def test_time_in_which_hosts_are_set_up_says_nothing_about_the_pace() -> None:
    work, clock = workload(Phase("baseline", 100))
    clock.now += 60.0
    work.pause()
    spend(work, clock, "baseline", 10, seconds=1.0)
    assert work.seconds_left() == pytest.approx(9.0)


def test_work_of_an_earlier_process_is_done_but_says_nothing_about_the_pace() -> None:
    work, clock = workload(Phase("rounds", 100))
    work.skip("rounds", 50)
    assert work.seconds_left() is None
    spend(work, clock, "rounds", 10, seconds=30.0)
    assert work.seconds_left() == pytest.approx(120.0)


def test_hosts_that_end_early_shorten_the_phase() -> None:
    work, clock = workload(Phase("rounds", 100))
    spend(work, clock, "rounds", 20, seconds=20.0)
    work.settle("rounds", 50)
    assert work.done("rounds") == 50
    assert work.seconds_left() == pytest.approx(20.0)


def test_equal_parts_are_planned_with_the_first() -> None:
    work, _ = workload(Phase("rounds", 10))
    work.add([Phase("rounds", 5)])
    work.repeat(3)
    work.add([Phase("rounds", 15)])  # of the second part
    assert work.phases["rounds"].total == 45


def test_a_report_that_fails_does_not_stop_the_work() -> None:
    def fails(_work: Workload) -> None:
        raise OSError("no terminal")

    work = Workload()
    work.report = fails
    work.add([Phase("rounds", 2)])
    work.advance("rounds", 1)
    assert work.report is None
    assert work.done("rounds") == 1


def test_every_count_is_reported() -> None:
    reported: list[str | None] = []
    work = Workload()
    work.report = lambda work: reported.append(work.current)
    work.add([Phase("baseline", 2)])
    work.counter("baseline")(2)
    work.advance("unplanned", 1)
    assert reported == ["baseline"]


def test_without_planned_work_the_time_left_is_unknown() -> None:
    work, _ = workload()
    assert work.seconds_left() is None
    assert work.part == 0.0


def test_time_of_no_units_says_nothing_about_the_pace() -> None:
    now = iter([0.0, 0.0, 100.0, 102.0, 102.0])
    work = Workload(lambda: next(now))
    work.add([Phase("rounds", 10.0)])
    work.start()
    work.advance("rounds", 0.0)
    work.advance("rounds", 1.0)
    assert work.phases["rounds"].seconds == 2.0
