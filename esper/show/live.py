"""The lines of a run in a terminal: with its progress below them while it works, and again by `esper show`."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from esper.show.console import ConsoleSink, TerminalConsole, played
from esper.show.page import answer
from esper.show.read import Run
from esper.show.view import RunView
from esper.telemetry import event as events
from esper.telemetry.event import Event
from esper.telemetry.text import clean, duration

REFRESH_SECONDS = 0.25
MAX_LINE = 500


class LiveSink(ConsoleSink):
    """Prints the lines of its base, and below them the progress of the run, which it redraws after events."""

    tells_epochs = False  # the progress has them

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(console, clock)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def start(self) -> None:
        """Begins to draw; the start of a run does so by itself."""
        self._live.start()

    def handle(self, event: Event) -> None:
        super().handle(event)
        if isinstance(event, events.RunStarted | events.RunResumed):
            self._live.start()
        self._draw(always=isinstance(event, events.RoundCompleted | events.RunCompleted))

    def close(self) -> None:
        """Removes the progress."""
        self._live.stop()

    def _draw(self, always: bool) -> None:
        now = time.perf_counter()
        fresh = now - self._drawn < REFRESH_SECONDS
        if not self._live.is_started or (fresh and not always):
            return
        self._drawn = now
        self._live.update(Text(progress(self._view)), refresh=True)


def progress(view: RunView) -> str:
    """Returns the phase of the run, the part of it that is done, and the time that the rest of the phase takes."""
    pace = view.pace
    phase = pace.phase or "start"
    if phase == "rounds" and view.rounds > 0:
        phase = f"round {min(view.done + 1, view.rounds)}/{view.rounds}"
    left = pace.seconds_left()
    remaining = "estimating the rest"
    if left is not None:
        remaining = f"about {duration(left)} left"
    # The line end gives the ^C of an interrupt a line of its own.
    return f"{phase} {pace.part:4.0%}  {duration(pace.elapsed)} so far, {remaining}\n"


def progress_sink() -> ConsoleSink:
    """Returns a sink that shows the progress if the output is an interactive terminal, otherwise one of plain lines."""
    console = TerminalConsole()
    if console.is_interactive:
        return LiveSink(console)
    return ConsoleSink(console)


def is_watched() -> bool:
    """Whether somebody may look at the output now: it goes to a terminal, or into a notebook."""
    console = TerminalConsole()
    return console.is_interactive or console.is_jupyter


def short_form(run: Run) -> str:
    """Returns the state of a run, the lines that it has printed, and its answer, without terminal control codes."""
    about = ", ".join(f"{name} {value}" for name, value in run.about.items())
    lines = [f"{run.folder}: {run.state_words()}", about, *_pace(run), *run.all_problems(), "", *run.lines]
    if run.last(events.RunCompleted) is not None:
        lines += ["", answer(run.view)]
    return "\n".join(clean(line, MAX_LINE) for line in lines)


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
