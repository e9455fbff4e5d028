"""A live view of the run in a terminal: progress, hosts, policy, and where the time goes."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.telemetry import event as events
from esper.telemetry import status
from esper.telemetry.event import Event
from esper.telemetry.run_view import RunView
from esper.telemetry.sinks.console import ConsoleSink
from esper.telemetry.text import duration

REFRESH_SECONDS = 0.25


class LiveSink:
    """Redraws the view in place a few times per second.

    Lasting information (the header, rollbacks, cut seeds, the comparison) is printed above it by :class:`ConsoleSink`.
    """

    def __init__(self, console: Console) -> None:
        self._view = RunView()
        self._lines = ConsoleSink(console, self._view)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._start = time.perf_counter()
        self._drawn = 0.0

    def handle(self, event: Event) -> None:
        self._view.handle(event)
        match event:
            case events.PolicyUpdated():
                pass  # only drawn
            case events.PracticeRound() | events.RoundCompleted() if event.round < event.rounds:
                pass
            case _:
                self._lines.handle(event)
        if isinstance(event, events.RunStarted | events.RunResumed):
            self._live.start()
        elif isinstance(event, events.PracticeRound):
            self._start = time.perf_counter()  # the time left is estimated from real rounds
        self._draw(always=isinstance(event, events.RoundCompleted | events.RunCompleted))

    def close(self) -> None:
        """Removes the view; prints the last round as a line, unless it was the run's final one."""
        self._live.stop()
        if (last := self._view.last(events.RoundCompleted)) and last.round < last.rounds:
            self._lines.handle(last)

    def _draw(self, always: bool) -> None:
        now = time.perf_counter()
        if not self._live.is_started or (now - self._drawn < REFRESH_SECONDS and not always):
            return
        self._drawn = now
        self._live.update(self.picture(now - self._start), refresh=True)

    def picture(self, elapsed: float) -> RenderableType:
        """Returns the view after ``elapsed`` seconds of training in this process."""
        view = self._view
        practice, last = view.last(events.PracticeRound), view.last(events.RoundCompleted)
        if practice is not None and practice.round < practice.rounds:
            return Text(status.practice(practice))
        sections = [status.seed_counts(view), status.policy(view), status.warnings(view), status.time(view)]
        if last or view.current:
            sections.insert(0, status.accuracy(view))
        if last:
            sections.append(("rate", [status.rates(last)]))
        return Group(self._progress(elapsed), *(Text(line) for line in status.layout(sections)))

    def _progress(self, elapsed: float) -> Table:
        view = self._view
        left = view.seconds_left(elapsed)
        remaining = "comparing" if view.done >= view.rounds else f"{'?' if left is None else duration(left)} left"
        row = Table.grid(padding=(0, 2))
        row.add_row(
            f"round {min(view.done + 1, view.rounds)}/{view.rounds}",
            ProgressBar(total=max(view.rounds, 1), completed=view.done + view.part_of_round, width=32),
            f"{duration(elapsed)} elapsed, {remaining}",
        )
        return row


def progress_sink(console: Console) -> ConsoleSink | LiveSink:
    """Returns a live view if the output is an interactive terminal, otherwise plain lines."""
    return LiveSink(console) if console.is_interactive else ConsoleSink(console)
