"""`esper show`: the status of a run as a screenful of plain lines, once or until the run ends."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

from rich.console import Console
from rich.live import Live
from rich.text import Text

from esper.show import status
from esper.show.console import TerminalConsole
from esper.show.read import Run
from esper.telemetry.event import ArmPlayed, PracticeRound, RoundCompleted, RunCompleted, RunStarted
from esper.telemetry.text import clean, count, duration

HEAD = status.HEAD_WIDTH
REFRESH_SECONDS = 1.0
MAX_SILENCE = 60.0
"""Seconds without a new event after which a run of unknown state counts as ended."""


def short_form(run: Run, width: int | None = None) -> str:
    """Returns the status; lines longer than ``width`` wrap, indented. The text contains no terminal control codes."""
    view = run.view
    sections = [
        ("run", [str(run.folder), _description(run)]),
        ("state", [run.state_words(), *_pace(run)]),
        status.accuracy(view),
        status.verdict(view),
        status.slots(view, width),
        status.blueprints(view),
        status.worths(view),
        status.policy(view),
        status.warnings(view),
        status.time(view),
        status.memory(view),
        status.last_events(view),
        ("problems", run.all_problems()),
    ]
    lines: list[str] = []
    for line in _lines(sections):
        lines += _wrapped(line, width)
    return "\n".join(lines)


def _lines(sections: Iterable[status.Section]) -> Iterator[str]:
    """Yields the lines of all sections, with the heading in front of the first line of each."""
    for head, lines in sections:
        for line in lines:
            yield f"{head:{HEAD}s}{clean(line, status.MAX_LINE)}".rstrip()
            head = ""


def _wrapped(line: str, width: int | None) -> list[str]:
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(line, max(width, 2 * HEAD), subsequent_indent=" " * HEAD, drop_whitespace=True)


def _description(run: Run) -> str:
    started = run.last(RunStarted)
    if started is None:
        values = {
            "task": run.value("task", "name"),
            "controller": run.value("run", "controller"),
            "seed": run.value("run", "seed"),
        }
        known = [f"{name} {value}" for name, value in values.items() if value is not None]
        return ", ".join(known) or "its start was not logged and it has no config.toml"
    hosts = count(started.n_envs, "host")
    return (
        f"task {started.task}, controller {started.controller}, seed {started.seed}, {hosts} of "
        f"{started.host_parameters:,} parameters, {started.episode_length} epochs each"
    )


def _pace(run: Run) -> list[str]:
    """Describes the position within the round, the rate, and the time left, as far as they are known."""
    completed = run.last(RunCompleted)
    if run.finished and completed:
        return [f"took {duration(completed.seconds)}"]
    view = run.view
    last = run.last(RoundCompleted)
    arm = run.last(ArmPlayed)
    practice = run.last(PracticeRound)
    playing = view.done < run.rounds
    words = []
    if view.current:
        words.append(f"round {view.done + 1}, epoch {max(view.curve_epochs)}")
    elif practice and not view.hosts:
        words.append(f"practice on simulated hosts, round {practice.round} of {practice.rounds}")
    if arm and not playing:
        words.append(f"comparing: {arm.controller}, round {arm.round} of {arm.rounds}")
    if last:
        words.append(status.rates(last))
    left = view.seconds_left()
    if left is not None and run.state() != "interrupted" and playing:
        words.append(f"about {duration(left)} left for the rounds")
    if not words:
        return []
    return [", ".join(words)]


def show(run: Run, console: Console | None = None) -> None:
    """Prints the status once."""
    console = console or TerminalConsole()
    console.print(_text(run, console), soft_wrap=True)


def _text(run: Run, console: Console) -> Text:
    """Wraps lines for a terminal, but not in a pipe or a file. A Text ignores markup."""
    width = console.width if console.is_terminal else None
    return Text(short_form(run, width))


def in_progress(run: Run) -> bool:
    """Whether the run is expected to write more."""
    state = run.state()
    return state == "running" or (state == "unknown" and run.silent_seconds < MAX_SILENCE)


def watch(run: Run, console: Console | None = None, pause: Callable[[float], None] = time.sleep) -> None:
    """Shows the run until it ends: in place in a terminal, otherwise again after each of its rounds.

    Ctrl-C ends only the view; the run is another process and is not affected.
    """
    console = console or TerminalConsole()
    terminal = Live(console=console, auto_refresh=False, transient=True) if console.is_interactive else nullcontext()
    shown = -1
    try:
        with terminal as live:
            while in_progress(run):
                if live is not None:
                    live.update(_text(run, console), refresh=True)
                elif run.view.done != shown:
                    shown = run.view.done
                    show(run, console)
                    console.print()
                pause(REFRESH_SECONDS)
                run.refresh()
        show(run, console)
    except KeyboardInterrupt:
        words = "The view was closed; the run continues." if in_progress(run) else ""
        console.print(words, highlight=False)
