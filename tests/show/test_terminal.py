"""`esper show`: the short form, and watching a run until it ends."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from esper.show.live import in_progress, short_form, show, watch
from esper.show.read import open_run
from esper.telemetry.event import (
    PolicyUpdated,
    RoundCompleted,
    RunCompleted,
)
from tests.show.page_helpers import Going, in_the_second_round


def plain() -> tuple[Console, io.StringIO]:
    """A console that is a pipe."""
    out = io.StringIO()
    return Console(file=out, width=80), out


def test_the_short_form_has_all_sections_of_a_finished_run(learned: Path) -> None:
    run = open_run(learned)
    lines = short_form(run).splitlines()
    heads = [line[:13].strip() for line in lines if line[:13].strip()]
    known = ["run", "state", "verdict", "accuracy", "slots", "agent"]
    assert heads == [*known, "time", "blueprints", "memory", "events"]
    text = "\n".join(lines)
    assert "finished: 3 rounds played and compared" in text
    update, completed, last = (
        run.last(PolicyUpdated),
        run.last(RunCompleted),
        run.last(RoundCompleted),
    )
    assert update is not None
    assert completed is not None
    assert last is not None
    assert f"{update.entropy:.3f}" in text
    gain = last.committed_accuracy - last.baseline_accuracy
    assert (
        f" {last.committed_accuracy:.1f} % grown, round 3, validation: {gain:+.1f} pp"
        in text
    )
    assert f" {last.baseline_accuracy:.1f} % without growth" in text
    for comparison in completed.comparisons:
        assert f"{comparison.difference:+.2f} " in text
        assert comparison.verdict.partition(" (")[0] in text
    for host in range(2):
        assert sum(line[13:].startswith(f"host {host} ") for line in lines) == 1
    (memory,) = [line for line in lines if line.startswith("memory ")]
    assert re.fullmatch(
        r"memory +cpu: copies [\d.]+ KiB, copies per host [\d.]+ KiB, resident [\d.]+ [MG]iB",
        memory,
    )


def test_long_lines_wrap_in_a_terminal_only(learned: Path) -> None:
    run = open_run(learned)
    out = io.StringIO()
    show(run, Console(file=out, width=80, force_terminal=True, color_system=None))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    whole = short_form(run)
    assert max(map(len, whole.splitlines())) > 100
    # Blocks and bars are as wide as the terminal; all words are in both.
    words = set(re.findall(r"[a-z]{3,}", whole)) - {"learned", "recorded", "run"}
    assert words <= set(re.findall(r"[a-z]{3,}", out.getvalue()))


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
    assert " grown, epoch 2, validation" in text


def test_a_watched_run_is_shown_until_it_ends(going: Callable[..., Going]) -> None:
    begun = going(lambda event: isinstance(event, RoundCompleted))
    console, out = plain()
    run = open_run(begun.folder)
    assert in_progress(run)
    watch(run, console, pause=lambda _: begun.end())
    shown = [line for line in out.getvalue().splitlines() if line.startswith("state")]
    assert shown[0].endswith("running: 1 of 3 rounds completed")
    assert shown[-1].endswith("finished: 3 rounds played and compared")
    assert "\x1b" not in out.getvalue()


def test_an_interrupt_ends_only_the_view(going: Callable[..., Going]) -> None:
    console, out = plain()

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    begun = going(lambda event: isinstance(event, RoundCompleted))
    watch(open_run(begun.folder), console, pause=interrupt)
    assert "The view was closed; the run continues." in out.getvalue()


def test_watching_an_ended_run_shows_it_once(grown: Path) -> None:
    console, out = plain()
    watch(open_run(grown), console, pause=lambda _: pytest.fail("it waited"))
    assert out.getvalue().count("state") == 1


def test_the_last_view_stays_in_the_terminal(grown: Path) -> None:
    out = io.StringIO()
    console = Console(
        file=out,
        width=100,
        force_terminal=True,
        force_interactive=True,
        color_system=None,
    )
    watch(open_run(grown), console)
    assert out.getvalue().count("finished: 1 round played and compared") >= 1


def test_rollbacks_and_refusals_are_among_the_last_events(
    grown: Path, copy: Callable[..., Path]
) -> None:
    def refused(fields: dict[str, Any]) -> dict[str, Any]:
        if fields["event"] == "ActionTaken":
            return {**fields, "accepted": False, "reason": "the gate is shut"}
        return fields

    folder = copy(grown, refused)
    with (folder / "events.jsonl").open("a") as log:
        log.write(
            '{"event": "GovernorRollback", "schema": 1, "env": 1, "episode": 1, "epoch": 23, "reason": "spike", '
            '"value": "inf", "threshold": 2.5, "restored_epoch": 20, "rollbacks": 1}\n'
        )
    text = short_form(open_run(folder))
    assert re.search(
        r"round 2, host 1, epoch 23 +rollback +spike \(infinite, limit", text
    )
    assert "refused: the gate is shut" in text
