"""Watching a run in progress."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from esper.report.read import Run
from esper.report.terminal import short_form
from esper.telemetry.sinks.console import TerminalConsole

SECONDS = 1.0
PATIENCE = 60.0
"""Seconds without a new event after which a run of unknown state counts as ended."""


def show(run: Run, console: Console | None = None) -> None:
    """Prints the short form once."""
    console = console or TerminalConsole()
    console.print(_text(run, console), soft_wrap=True)


def _text(run: Run, console: Console) -> Text:
    """Wraps lines for a terminal, but not in a pipe or a file. A Text ignores markup."""
    return Text(short_form(run, console.width if console.is_terminal else None))


def going(run: Run) -> bool:
    """Whether the run is expected to write more."""
    state = run.state()
    return state == "running" or (state == "unknown" and run.silent_seconds < PATIENCE)


def watch(run: Run, console: Console | None = None, pause: Callable[[float], None] = time.sleep) -> None:
    """Shows the run until it ends: in place in a terminal, otherwise again after each of its rounds.

    Ctrl-C ends only the view; the run is another process and is not affected.
    """
    console = console or TerminalConsole()
    try:
        if console.is_interactive:
            _redraw(run, console, pause)
        else:
            _repeat(run, console, pause)
    except KeyboardInterrupt:
        console.print("The view was closed; the run continues." if going(run) else "", highlight=False)


def _redraw(run: Run, console: Console, pause: Callable[[float], None]) -> None:
    with Live(_text(run, console), console=console, auto_refresh=False, transient=True) as live:
        while going(run):
            pause(SECONDS)
            run.refresh()
            live.update(_text(run, console), refresh=True)
    show(run, console)


def _repeat(run: Run, console: Console, pause: Callable[[float], None]) -> None:
    told = run.done
    show(run, console)
    while going(run):
        pause(SECONDS)
        run.refresh()
        if run.done != told or not going(run):
            told = run.done
            console.print()
            show(run, console)
