"""A live view of the run in a terminal: progress, curves, slots, what is planted, the agent, and the time."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from esper.show import picture, status
from esper.show.console import ConsoleSink, TerminalConsole
from esper.telemetry import event as events
from esper.telemetry.event import Event
from esper.telemetry.text import shorten
from esper.telemetry.workload import Workload

REFRESH_SECONDS = 0.25


class LiveSink(ConsoleSink):
    """Redraws the view in place a few times per second, whenever there is an event or work was done.

    Lasting information (the header, rollbacks, cut seeds, the comparison) is printed above it, as by its base.
    """

    def __init__(self, console: Console, work: Workload | None = None) -> None:
        super().__init__(console, work)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def start(self) -> None:
        """Begins to draw; the start of a run does so by itself."""
        self._live.start()

    def handle(self, event: Event) -> None:
        self._view.handle(event)
        under_way = isinstance(event, events.PracticeRound | events.RoundCompleted) and event.round < event.rounds
        if not under_way and not isinstance(event, events.PolicyUpdated):  # those are only drawn
            self._tell(event)
        if isinstance(event, events.RunStarted | events.RunResumed):
            self._live.start()
        self._draw(always=isinstance(event, events.RoundCompleted | events.RunCompleted))

    def close(self) -> None:
        """Removes the view; prints the last round as a line, unless it was the run's final one."""
        self.work.report = None
        self._live.stop()
        last = self._view.last(events.RoundCompleted)
        if last is not None and last.round < last.rounds:
            self._tell(last)

    def _worked(self, work: Workload) -> None:
        super()._worked(work)
        self._draw(always=False)

    def _draw(self, always: bool) -> None:
        now = time.perf_counter()
        fresh = now - self._drawn < REFRESH_SECONDS
        if not self._live.is_started or (fresh and not always):
            return
        self._drawn = now
        self._live.update(self.picture(), refresh=True)

    def picture(self) -> RenderableType:
        """Returns the view as it is now."""
        view = self._view
        width = self._console.width
        ascii_only = self._console.options.ascii_only
        blocks = picture.ASCII_BLOCKS if ascii_only else picture.BLOCKS
        wide = width >= picture.WIDE
        half = (width - 2) // 2 if wide else width  # two columns lie between the sides
        left = [
            (shorten(view.score.name, picture.HEAD - 1), picture.curves(view, half, blocks)),
            ("slots", picture.slots(view, half, ascii_only)),
        ]
        if wide:
            left.append(("hosts", picture.hosts(view)))
        # The worths of seeds say more than their number, once they are known.
        seeds = status.worths(view, most=1)
        if not seeds[1]:
            seeds = status.blueprints(view)
        right = [
            picture.plain(*seeds),
            ("agent", picture.agent(view, half, blocks)),
            picture.plain(*status.warnings(view)),
            picture.plain(*status.time(view)),
        ]
        last = view.last(events.RoundCompleted)
        if last is not None:
            right.append(picture.plain("rate", [status.rates(last)]))
        progress = picture.progress(view, self.work, width)
        # Last, so that the ^C of an interrupt is not echoed behind a full line: it would wrap, and the view scroll.
        end = Text("")
        if not wide:
            return Group(*progress, *_parts(left), *_parts(right), end)
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        table.add_row(Group(*_parts(left)), Group(*_parts(right)))
        return Group(*progress, table, end)


def _parts(sections: Iterable[tuple[str, list[Text]]]) -> list[Table]:
    """Returns the sections that have any lines."""
    return [picture.part(head, lines) for head, lines in sections if lines]


def progress_sink() -> ConsoleSink:
    """Returns a live view if the output is an interactive terminal, otherwise plain lines."""
    console = TerminalConsole()
    return LiveSink(console) if console.is_interactive else ConsoleSink(console)
