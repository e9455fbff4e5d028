"""The section on where the time went."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from esper.show import cost
from esper.show.charts import Line
from esper.show.cost import memory_table, time_section, waiting_tables
from esper.show.read import Run, open_run
from esper.show.view import REST
from esper.telemetry.event import RanksWaited, RoundCompleted
from tests.show.page_helpers import fed


def timed(run: Run, *rounds: dict[str, float]) -> Run:
    """``run`` with as many rounds, each of 10 s, and the seconds of their phases."""
    first = run.of(RoundCompleted)[0]
    run.view.log[RoundCompleted].clear()
    for number, phases in enumerate(rounds, start=1):
        run.view.handle(
            dataclasses.replace(first, round=number, phase_seconds=phases, seconds=10.0)
        )
    return run


def test_phases_are_added_over_rounds_and_the_rest_comes_last(grown: Path) -> None:
    html = time_section(
        [
            timed(
                open_run(grown),
                {"train": 6.0, "decide": 1.0},
                {"train": 4.0, "decide": 3.0},
            )
        ]
    )
    rows = [html.index("train:"), html.index("decide:"), html.index(f"{REST}:")]
    assert rows == sorted(rows), "the longest first"
    assert "<td class=n>10.0</td><td class=n>50.0%</td>" in html
    assert "<td class=n>4.0</td><td class=n>20.0%</td>" in html
    assert (
        "<td class=n>6.0</td><td class=n>30.0%</td>" in html
    )  # 20 s in all, 14 of them in phases


def test_before_the_first_round_no_time_is_shown(grown: Path) -> None:
    run = timed(open_run(grown))
    assert "No round was completed yet." in time_section([run])


def test_several_runs_stand_side_by_side(
    grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, list[Line]] = {}
    monkeypatch.setattr(
        cost,
        "line_figure",
        lambda title, _words, lines, *_, **__: drawn.setdefault(title, lines) and "",
    )
    one, two = (
        timed(open_run(grown, "one"), {"train": 6.0}, {"train": 4.0}),
        timed(open_run(grown, "two"), {"train": 8.0}),
    )
    html = time_section([one, two])
    assert [line.name for line in drawn["one: Seconds of each round"]] == [
        "train",
        REST,
    ]
    assert [list(line.y) for line in drawn["two: Seconds of each round"]] == [
        [8.0],
        [2.0],
    ]
    assert '<th scope="col">two, s</th>' in html


def test_memory_is_that_of_the_last_round_by_use_and_place(grown: Path) -> None:
    run = timed(open_run(grown), {}, {})
    run.view.log[RoundCompleted][0] = dataclasses.replace(
        run.of(RoundCompleted)[0], memory={"process/cpu": 1}
    )
    run.view.log[RoundCompleted][1] = dataclasses.replace(
        run.of(RoundCompleted)[1], memory={"unheard_of/cuda:1": 3 << 30}
    )
    html = memory_table([run])
    assert "unheard of, cuda:1" in html
    assert "3.0 GiB" in html
    assert "process" not in html
    run.view.log[RoundCompleted][1] = dataclasses.replace(
        run.of(RoundCompleted)[1], memory={}
    )
    assert memory_table([run]) == ""


def test_ranks_are_shown_with_the_share_that_they_waited(grown: Path) -> None:
    run = open_run(grown, "ranks")
    assert waiting_tables([run]) == []
    fed(run, RanksWaited(1, 6.0, (0.5, 1.0)), RanksWaited(2, 4.0, (0.5, 3.0)))
    (html,) = waiting_tables([run])
    assert "ranks: waiting for other ranks, all rounds" in html
    assert "<td class=n>1.0</td><td class=n>10.0%</td>" in html
    assert "<td class=n>4.0</td><td class=n>40.0%</td>" in html
