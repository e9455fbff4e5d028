"""Charts of the score of hosts beside hosts left alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from esper.show import accuracy
from esper.show.accuracy import (
    accuracy_section,
    capital,
    epochs_figure,
    parameters_figure,
    rounds_figure,
)
from esper.show.charts import Line
from esper.show.read import Run, open_run
from esper.telemetry.event import (
    BaselineMeasured,
    EpisodeCompleted,
    EpochCompleted,
    RoundCompleted,
    ScoreDefined,
)

Drawn = dict[str, list[Line]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """The lines of each chart that is made, by its title."""
    found: Drawn = {}

    def keep_lines(
        title: str, _words: str, lines: list[Line], *_: object, **__: object
    ) -> str:
        found[title] = list(lines)
        return ""

    def keep_points(title: str, lines: list[Line], *_: object) -> str:
        found[title] = list(lines)
        return "<svg></svg>"

    monkeypatch.setattr(accuracy, "line_figure", keep_lines)
    monkeypatch.setattr(accuracy, "scatter_chart", keep_points)
    return found


def test_a_score_with_capitals_of_its_own_keeps_them() -> None:
    assert [capital(name) for name in ("accuracy", "BLEU score")] == [
        "Accuracy",
        "BLEU score",
    ]


def test_one_run_is_shown_with_its_extremes_and_its_baseline(
    grown: Path, drawn: Drawn
) -> None:
    run = open_run(grown)
    epochs_figure([run])
    lines = {line.name: line for line in drawn["Accuracy by epoch"]}
    assert set(lines) == {
        "grown",
        "best host",
        "worst host",
        "committed",
        "left alone (baseline)",
    }
    last = [e for e in run.of(EpochCompleted) if e.epoch == 24]
    accuracies = [e.validation_accuracy for e in last]
    assert lines["grown"].y[-1] == pytest.approx(sum(accuracies) / len(accuracies))
    assert (lines["worst host"].y[-1], lines["best host"].y[-1]) == (
        min(accuracies),
        max(accuracies),
    )
    (baseline,) = run.of(BaselineMeasured)
    assert tuple(lines["left alone (baseline)"].y) == baseline.accuracy


def test_runs_of_one_task_and_seed_share_their_baseline(
    grown: Path, drawn: Drawn
) -> None:
    runs = [open_run(grown, name) for name in ("one", "two")]
    epochs_figure(runs)
    assert [line.name for line in drawn["Accuracy by epoch"]] == [
        "one: grown",
        "two: grown",
        "left alone (baseline)",
    ]
    (own,) = runs[1].of(BaselineMeasured)
    runs[1].view.handle(dataclasses.replace(own, accuracy=(1.0, *own.accuracy[1:])))
    epochs_figure(runs)
    assert [line.name for line in drawn["Accuracy by epoch"] if line.reference] == [
        "one: left alone (baseline)",
        "two: left alone (baseline)",
    ]


def test_rounds_are_shown_in_the_unit_of_the_score(grown: Path, drawn: Drawn) -> None:
    run = open_run(grown)
    committed = [e.committed_accuracy for e in run.of(RoundCompleted)]
    rounds_figure([run])
    lines = {line.name: list(line.y) for line in drawn["Accuracy by round"]}
    assert lines["grown, committed"] == pytest.approx(committed)
    assert "same hosts alone, test" in lines
    run.view.handle(ScoreDefined("bits saved", "bit", 20.0))
    rounds_figure([run])
    lines = {line.name: list(line.y) for line in drawn["Bits saved by round"]}
    assert lines["grown, committed"] == pytest.approx(
        [value / 20 for value in committed]
    )


def test_each_host_is_a_point_by_its_parameters(
    grown: Path, drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(grown)
    ended = run.of(EpisodeCompleted)
    parameters_figure([run])
    points = drawn["Accuracy against parameters"][0]
    assert list(points.x) == [e.host_parameters + e.fossil_parameters for e in ended]
    assert list(points.y) == [e.committed_accuracy for e in ended]
    monkeypatch.setattr(accuracy, "MAX_EPISODES", 1)
    html = parameters_figure([run])
    assert list(drawn["Accuracy against parameters"][0].y) == [
        ended[-1].committed_accuracy
    ]
    assert "At most the newest 1 hosts of each run are drawn." in html


def test_an_empty_run_says_what_is_missing(tmp_path: Path) -> None:
    html = accuracy_section([Run(tmp_path, "empty")])
    for words in (
        "no epochs and no baseline were logged",
        "no round was completed",
        "no host has completed",
    ):
        assert words in html
