"""`esper show`: the state of a run and its lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from esper.show.live import short_form
from esper.show.read import open_run
from esper.telemetry.event import (
    PolicyUpdated,
    RoundCompleted,
)
from tests.show.page_helpers import Going, in_the_second_round


def test_the_short_form_of_a_finished_run(learned: Path) -> None:
    run = open_run(learned)
    text = short_form(run)
    assert "finished: 3 rounds played and compared" in text.splitlines()[0]
    update = run.last(PolicyUpdated)
    assert update is not None
    for line in (
        "ppo will grow 6 hosts on",
        "round 3/3  ",
        f"entropy {update.entropy:.2f}",
        "comparing, round 1/1: none, test accuracy",
        "grown by ppo, hosts reached a test accuracy of",
    ):
        assert line in text, line


def test_the_time_left_is_that_of_the_remaining_rounds(
    going: Callable[..., Going],
) -> None:
    run = open_run(going(in_the_second_round).folder)
    view = run.view
    assert view.part_of_round == pytest.approx(3 / (2 * view.begun.episode_length))
    (first,) = run.of(RoundCompleted)
    left = (3 - 1 - view.part_of_round) * first.seconds
    assert view.pace.seconds_left() == pytest.approx(left)
    text = short_form(run)
    assert "left for the rounds" in text
    assert "round 2, epoch 2" in text


def test_rollbacks_are_among_the_lines(grown: Path, copy: Callable[..., Path]) -> None:
    folder = copy(grown)
    with (folder / "events.jsonl").open("a") as log:
        log.write(
            '{"event": "GovernorRollback", "schema": 1, "env": 1, "episode": 1, "epoch": 23, "reason": "spike", '
            '"value": "inf", "threshold": 2.5, "restored_epoch": 20, "rollbacks": 1}\n'
        )
    text = short_form(open_run(folder))
    assert "rollback: round 2, host 1, epoch 23: spike (infinite, limit" in text
