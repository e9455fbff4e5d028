"""Lanes of slots, fates of blueprints, worths and contributions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from esper.show import growth
from esper.show.charts import IntervalRow, Line
from esper.show.growth import (
    blueprint_table,
    lives_section,
    seeds_figure,
    shapley_figure,
    slots_figure,
    worth_table,
)
from esper.show.read import Run, open_run
from esper.telemetry.event import EpisodeCompleted, EpochCompleted, WorthsEstimated
from tests.show.page_helpers import fed
from tests.show.test_overview import cells

Rows = list[IntervalRow]


@pytest.fixture
def intervals(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The rows of the charts of intervals that are made."""
    found: Rows = []

    def keep(_title: str, rows: Rows, *_: object) -> str:
        found.extend(rows)
        return "<svg></svg>"

    monkeypatch.setattr(growth, "interval_chart", keep)
    return found


def test_the_newest_round_is_open_and_comes_first(grown: Path) -> None:
    html = lives_section([open_run(grown)])
    rounds = re.findall(
        r"<details class=round( open)?><summary>Round (\d+), 2 hosts</summary>", html
    )
    assert rounds == [(" open", "2"), ("", "1")]


def test_no_more_hosts_are_drawn_than_a_page_can_hold(
    grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "MAX_LIVES", 2)
    html = lives_section([open_run(grown)])
    assert html.count("<details class=round") == 1
    assert "Only 2 of 4 hosts are drawn, those of the newest rounds." in html


def test_nothing_logged_has_no_lanes(tmp_path: Path) -> None:
    assert "No epochs and no slot changes were logged." in lives_section(
        [Run(tmp_path, "empty")]
    )


def test_fates_of_blueprints_add_up(grown: Path) -> None:
    run = open_run(grown)
    html = blueprint_table(run)
    kept = [
        blueprint for e in run.of(EpisodeCompleted) for blueprint in e.fossils.values()
    ]
    assert kept
    for blueprint in set(kept):
        assert cells(html, blueprint)[2] == str(kept.count(blueprint))
    if len(set(kept)) > 1:
        assert cells(html, run.view.blueprints.total().blueprint)[2] == str(len(kept))


def test_worths_are_shown_with_their_errors_and_counts(tmp_path: Path) -> None:
    run = Run(tmp_path, "a run")
    assert worth_table(run) == ""
    for episodes in (0, 16):
        run.view.handle(
            WorthsEstimated(1, episodes, 1.2, {"r0c0": {"norm": (-0.25, 0.5, 3)}})
        )
        assert bool(worth_table(run)) == bool(episodes)
    html = worth_table(run)
    assert cells(html, "r0c0") == ["norm", "-0.25", "0.50", "3"]
    assert "estimated from 16 episodes" in html


def test_contributions_by_epoch_are_means_with_their_intervals(
    grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Line] = []
    monkeypatch.setattr(
        growth,
        "line_figure",
        lambda _title, _words, lines, *_, **__: drawn.extend(lines) or "",
    )
    run = open_run(grown)
    slots_figure(run)
    assert drawn
    for line in drawn:
        for epoch, value in zip(line.x, line.y, strict=True):
            own = [
                e.contributions[line.name]
                for e in run.of(EpochCompleted)
                if e.epoch == epoch and line.name in e.contributions
            ]
            assert value == pytest.approx(sum(own) / len(own))
    run.view.log[EpochCompleted].clear()
    assert "No contribution was measured" in slots_figure(run)


def test_contributions_of_the_newest_round_have_normal_intervals(
    grown: Path, intervals: Rows
) -> None:
    run = open_run(grown)
    seeds_figure(run)
    measured = [
        (env, slot, value, last.contribution_errors[slot])
        for env, last in sorted(run.view.hosts.items())
        for slot, value in last.contributions.items()
    ]
    assert measured
    assert sorted(r.name.rsplit(" ", 1)[0] for r in intervals) == sorted(
        f"host {env} {slot}" for env, slot, *_ in measured
    )
    for row in intervals:
        value, error = next(
            (v, e)
            for env, slot, v, e in measured
            if row.name.startswith(f"host {env} {slot} ")
        )
        assert row.value == pytest.approx(value)
        assert (row.low, row.high) == pytest.approx(
            (value - 1.96 * error, value + 1.96 * error)
        )


def test_shapley_values_are_those_of_the_newest_round(
    tmp_path: Path, intervals: Rows
) -> None:
    def ended(
        env: int, episode: int, **shapley: tuple[float, float]
    ) -> EpisodeCompleted:
        return EpisodeCompleted(
            env, episode, 9, 0.0, 0.0, 0.0, 0.0, 100, 0, {}, 0, True, shapley
        )

    run = Run(tmp_path, "a run")
    assert shapley_figure(run) == ""
    fed(
        run,
        ended(0, 0, r0c0=(9.0, 1.0)),
        ended(1, 1, r0c0=(2.0, 0.5), r1c0=(1.0, float("nan"))),
    )
    shapley_figure(run)
    assert [(r.name, r.value) for r in intervals] == [
        ("host 1 r0c0", 2.0),
        ("host 1 r1c0", 1.0),
    ]
    assert (intervals[0].low, intervals[0].high) == pytest.approx(
        (2 - 1.96 * 0.5, 2 + 1.96 * 0.5)
    )
    assert (intervals[1].low, intervals[1].high) == (None, None)
