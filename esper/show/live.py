"""One view of a run in a terminal: of a run at work in this process, and of a run folder by `esper show`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from esper.show.console import ConsoleSink, TerminalConsole, played, size
from esper.show.read import Run
from esper.show.screen import picture, plain, progress, section, text
from esper.telemetry import event as events
from esper.telemetry.event import Event
from esper.telemetry.text import duration

REFRESH_SECONDS = 0.25
WATCH_SECONDS = 1.0
PIPE_WIDTH = 80
"""Columns that curves are drawn for where the output is no terminal."""
MAX_SILENCE = 60.0
"""Seconds without a new event after which a run of unknown state counts as ended."""


class LiveSink(ConsoleSink):
    """Redraws the view in place a few times per second, after an event.

    Lasting information (the header, rounds, rollbacks, cut seeds, the comparison) is printed above it, as by its base.
    """

    tells_epochs = False  # the view has them

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(console, clock)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def start(self) -> None:
        """Begins to draw; the start of a run does so by itself."""
        self._live.start()

    def handle(self, event: Event) -> None:
        self._view.handle(event)
        if not isinstance(event, events.PolicyUpdated):  # those are only drawn
            self._tell(event)
        if isinstance(event, events.RunStarted | events.RunResumed):
            self._live.start()
        self._draw(always=isinstance(event, events.RoundCompleted | events.RunCompleted))

    def close(self) -> None:
        """Removes the view."""
        self._live.stop()

    def _draw(self, always: bool) -> None:
        now = time.perf_counter()
        fresh = now - self._drawn < REFRESH_SECONDS
        if not self._live.is_started or (fresh and not always):
            return
        self._drawn = now
        self._live.update(self.picture(), refresh=True)

    def picture(self) -> Group:
        """Returns the view as it is now."""
        console = self._console
        return picture(self._view, console.width, console.options.ascii_only, [progress(self._view, console.width)])


def progress_sink() -> ConsoleSink:
    """Returns a live view if the output is an interactive terminal, otherwise plain lines."""
    console = TerminalConsole()
    if console.is_interactive:
        return LiveSink(console)
    return ConsoleSink(console)


def is_watched() -> bool:
    """Whether somebody may look at the output now: it goes to a terminal, or into a notebook."""
    console = TerminalConsole()
    return console.is_interactive or console.is_jupyter


def head(run: Run) -> list[RenderableType]:
    """Returns what a run folder says in place of the progress of a run at work."""
    started = run.last(events.RunStarted)
    about = [str(run.folder), ", ".join(f"{name} {value}" for name, value in run.about.items())]
    if started is not None:
        about += size(started)
    said = {"run": about, "state": [run.state_words(), *_pace(run)], "problems": run.all_problems()}
    lines: list[RenderableType] = []
    for name, words in said.items():
        lines += section(name, list(map(text, words)))
    return lines


def _pace(run: Run) -> list[str]:
    """Describes the position within the round, and the time left, as far as they are known."""
    view = run.view
    completed = run.last(events.RunCompleted)
    arm = run.last(events.ArmPlayed)
    if run.finished and completed:
        return [f"took {duration(completed.seconds)}"]
    if view.rounds <= view.done:
        if arm is None:
            return []
        return [played(arm, view)]
    lines = []
    if view.epochs and view.under_way:
        lines.append(f"round {view.done + 1}, epoch {max(view.epochs)}")
    left = view.pace.seconds_left()
    if left is not None and run.state() != "interrupted":
        lines.append(f"about {duration(left)} left for the rounds")
    return lines


def short_form(run: Run, ascii_only: bool = False) -> str:
    """Returns the view as text without terminal control codes; long lines do not wrap."""
    return plain(picture(run.view, PIPE_WIDTH, ascii_only, head(run)))


def show(run: Run, console: Console | None = None) -> None:
    """Prints the view once."""
    console = console or TerminalConsole()
    if console.is_terminal:
        console.print(_picture(run, console))
    else:
        console.print(Text(short_form(run, console.options.ascii_only)), soft_wrap=True)


def _picture(run: Run, console: Console) -> Group:
    return picture(run.view, console.width, console.options.ascii_only, head(run))


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
                    live.update(_picture(run, console), refresh=True)
                elif run.view.done != shown:
                    shown = run.view.done
                    show(run, console)
                    console.print()
                pause(WATCH_SECONDS)
                run.refresh()
        show(run, console)
    except KeyboardInterrupt:
        words = ""
        if in_progress(run):
            words = "The view was closed; the run continues."
        console.print(words, highlight=False)
