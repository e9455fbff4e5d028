"""`esper show`: the short form, and watching a run until it ends."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from esper.show.live import in_progress, short_form, show, watch
from esper.show.read import open_run
from esper.telemetry.event import PolicyUpdated, RoundCompleted, RunCompleted
from tests.run.run_helpers import Does, play, round_ends, tiny, within_round


def plain() -> tuple[Console, io.StringIO]:
    """A console that is a pipe."""
    out = io.StringIO()
    return Console(file=out, width=80), out


def test_the_short_form_has_all_sections_of_a_finished_run(learned: Path) -> None:
    run = open_run(learned)
    lines = short_form(run).splitlines()
    heads = [line[:13].strip() for line in lines if line[:13].strip()]
    known = ["run", "state", "verdict", "accuracy", "slots", "worth", "agent"]
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


def test_the_time_left_is_that_of_the_remaining_rounds(tmp_path: Path) -> None:
    seen: list[tuple[float, float | None, str]] = []

    def look() -> None:
        run = open_run(tmp_path / "run")
        seen.append(
            (run.view.part_of_round, run.view.pace.seconds_left(), short_form(run))
        )

    play(tiny(rounds=3), tmp_path / "run", Does(within_round(2), look))
    ((part, left, text),) = seen
    assert part == pytest.approx(
        3 / 8
    )  # host 0 in its second of four epochs, host 1 in its first
    first = open_run(tmp_path / "run").of(RoundCompleted)[0]
    assert left == pytest.approx((3 - 1 - 3 / 8) * first.seconds)
    assert "left for the rounds" in text
    assert "round 2, epoch 2" in text
    assert " grown, epoch 2, validation" in text


def test_a_watched_run_is_shown_until_it_ends(tmp_path: Path) -> None:
    """The watcher is another thread here; it sees the folder and nothing else."""
    begun, release = threading.Event(), threading.Event()
    console, out = plain()

    def hold() -> None:
        begun.set()
        assert release.wait(60)

    def follow() -> None:
        begun.wait(60)
        run = open_run(tmp_path / "run")
        assert in_progress(run)
        watch(run, console, pause=lambda _: release.set())

    watcher = threading.Thread(target=follow)
    watcher.start()
    play(tiny(rounds=3), tmp_path / "run", Does(round_ends(1), hold))
    watcher.join(60)
    assert not watcher.is_alive()
    shown = [line for line in out.getvalue().splitlines() if line.startswith("state")]
    assert shown[0].endswith("running: 1 of 3 rounds completed")
    assert shown[-1].endswith("finished: 3 rounds played and compared")
    assert "\x1b" not in out.getvalue()


def test_watching_an_ended_run_shows_it_once(grown: Path) -> None:
    console, out = plain()
    watch(open_run(grown), console, pause=lambda _: pytest.fail("it waited"))
    assert out.getvalue().count("state") == 1


def test_an_interrupt_ends_only_the_view(tmp_path: Path) -> None:
    console, out = plain()

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    def look() -> None:
        watch(open_run(tmp_path / "run"), console, pause=interrupt)

    summary, _ = play(tiny(rounds=2), tmp_path / "run", Does(within_round(2), look))
    assert not summary.interrupted
    assert "The view was closed; the run continues." in out.getvalue()


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
