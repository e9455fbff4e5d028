"""Curves over many hosts, and what they are drawn of."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from esper.show.curves import by_epoch, label, mean, score_of, shown_epochs
from esper.show.read import Run, open_run
from esper.telemetry.event import EpochCompleted, ScoreDefined
from esper.telemetry.score import ACCURACY, ScoreUnit
from tests.show.page_helpers import fed
from tests.telemetry.sample_events import started


def epoch(env: int, number: int, value: float, episode: int = 0) -> EpochCompleted:
    return EpochCompleted(
        env, episode, number, 0.0, 0.0, 0.0, value, 0.0, 0.0, 1, 0, {}, {}, 0.0, {}
    )


def run_of(
    *epochs: EpochCompleted,
    controller: str = "schedule",
    folder: Path = Path("nowhere"),
) -> Run:
    return fed(Run(folder, "a run"), started(controller=controller), *epochs)


def test_a_curve_has_mean_spread_extremes_and_error_by_epoch() -> None:
    values = [10.0, 20.0, 40.0]
    curve = by_epoch(
        [epoch(env, 2, v) for env, v in enumerate(values)] + [epoch(0, 1, 5.0)],
        lambda e: e.validation_accuracy,
    )
    assert curve.x == [1, 2]
    assert curve.mean == pytest.approx([5.0, 70 / 3])
    assert (curve.worst, curve.best) == ([5.0, 10.0], [5.0, 40.0])
    assert (curve.low[1], curve.high[1]) == pytest.approx(
        tuple(np.percentile(values, [10, 90]))
    )
    assert math.isnan(curve.error[0])
    assert curve.error[1] == pytest.approx(np.std(values, ddof=1) / math.sqrt(3))


def test_values_that_cannot_be_drawn_are_left_out_of_a_curve() -> None:
    epochs = [
        epoch(0, 1, 4.0),
        epoch(1, 1, math.nan),
        epoch(2, 1, math.inf),
        epoch(0, 2, math.nan),
    ]
    curve = by_epoch(epochs, lambda e: e.validation_accuracy)
    assert (curve.x, curve.mean) == ([1], [4.0])
    assert by_epoch(epochs, lambda _: None).x == []


@pytest.mark.parametrize(
    ("controller", "rounds", "first", "words"),
    [
        ("schedule", 8, 0, "rounds 1 to 8"),
        ("ppo", 8, 6, "rounds 7 to 8"),
        ("ppo", 5, 3, "rounds 4 to 5"),
        ("ppo", 4, 3, "round 4"),
        ("schedule", 1, 0, "round 1"),
    ],
)
def test_an_agent_that_learns_is_shown_by_the_last_quarter_of_its_rounds(
    controller: str, rounds: int, first: int, words: str
) -> None:
    run = run_of(
        *(epoch(0, 1, 0.0, episode) for episode in range(rounds)), controller=controller
    )
    shown, described = shown_epochs(run)
    assert [e.episode for e in shown] == list(range(first, rounds))
    assert described == words


def test_nothing_is_shown_of_a_run_before_its_first_epoch() -> None:
    assert shown_epochs(run_of()) == ([], "no round")


def test_lines_are_named_by_their_run_if_there_are_several() -> None:
    run = run_of()
    assert label([run], run, "grown") == "grown"
    assert label([run, run], run, "grown") == "a run: grown"


def test_runs_with_different_scores_share_percentage_points(grown: Path) -> None:
    run, other = open_run(grown), open_run(grown)
    assert score_of([run, other]) == ACCURACY
    other.view.handle(ScoreDefined("bits", "bit", 20.0))
    assert score_of([other]).name == "bits"
    assert score_of([run, other]) == ScoreUnit("score", "pp")


def test_the_mean_is_of_finite_values() -> None:
    assert mean([1.0, None, math.nan, 4.0, math.inf]) == 2.5
    assert mean([None, math.nan]) is None
