"""The sections of a run in a terminal: beside the name of each, its lines, tables, and charts of small blocks."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from esper.show.charts import Block, Chart, SlotLanes, Table
from esper.show.console import TerminalConsole
from esper.show.sections import sections
from esper.show.view import STAGE_COLORS, STAGE_WORDS, RunView
from esper.telemetry.text import clean, duration, number, shorten

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.,-=+*#"
HEAD = 13
"""Columns of the names of sections."""
MAX_LINE = 500
MAX_ROWS = 8
MAX_HOSTS = 16
GROWN = "bold #009e73"
ALONE = "#888888"


def picture(view: RunView, width: int, ascii_only: bool, head: Iterable[RenderableType]) -> Group:
    """Returns the view for a terminal of ``width`` columns, below ``head``."""
    symbols = BLOCKS
    if ascii_only:
        symbols = ASCII_BLOCKS
    parts = [*head]
    for name, blocks in sections(view).items():
        lines: list[RenderableType] = []
        for block in blocks:
            lines += _lines(block, width - HEAD, symbols)
        if name == "accuracy":
            name = view.score.name
        parts += section(name, lines)
    # Last, so that the ^C of an interrupt is not echoed behind a full line: it would wrap, and the view scroll.
    return Group(*parts, Text(""))


def section(name: str, lines: Sequence[RenderableType]) -> list[RenderableType]:
    """Returns the lines beside their name; a line that is too long wraps between words. [] without lines."""
    if not lines:
        return []
    block = RichTable.grid(padding=(0, 1), expand=True)
    block.add_column(width=HEAD - 1, style="bold", no_wrap=True)
    block.add_column(ratio=1)
    beside = shorten(clean(name), HEAD - 2)
    for line in lines:
        block.add_row(beside, line)
        beside = ""
    return [block]


def text(words: str) -> Text:
    """Returns the words as they are: brackets are no markup."""
    return Text(clean(words, MAX_LINE))


def plain(shown: RenderableType) -> str:
    """Returns what a terminal would show for a pipe or a file: no line wraps, and there are no control codes."""
    file = io.StringIO()
    TerminalConsole(file=file, width=MAX_LINE, color_system=None).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def progress(view: RunView, width: int) -> RenderableType:
    """The phase of the run, the part of it that is done, and the time that the rest of the phase takes."""
    pace = view.pace
    phase = pace.phase or "start"
    if phase == "rounds" and view.rounds > 0:
        phase = f"round {min(view.done + 1, view.rounds)}/{view.rounds}"
    left = pace.seconds_left()
    remaining = "estimating the rest"
    if left is not None:
        remaining = f"about {duration(left)} left"
    bar = ProgressBar(total=1.0, completed=pace.part, width=max(10, min(60, width - 52)))
    row = RichTable.grid(padding=(0, 2))
    row.add_row(bar, Text(f"{phase} {pace.part:4.0%}  {duration(pace.elapsed)} so far, {remaining}", no_wrap=True))
    return row


def _lines(block: Block, width: int, symbols: str) -> list[RenderableType]:
    """Returns the lines of a block, none for those that only the page shows."""
    match block:
        case Chart(short=str(short)) if short:
            return list(_sparks(block, width, symbols))
        case Table() if block.columns != ():
            return _table(block)
        case SlotLanes():
            return [*_bar(block.view, width), *_hosts(block.view)]
    return []


def _sparks(chart: Chart, width: int, symbols: str) -> Iterable[Text]:
    """Yields a row for each line of a chart, all on one scale, with its last value; behind the first, the difference to
    the reference."""
    shown = [line for line in chart.lines if line.shared and line.y]
    values = [value for line in shown for value in line.y if math.isfinite(value)]
    if not values:
        return
    room = max(8, min(40, width - 50))
    for place, line in enumerate(shown):
        style = GROWN
        if line.reference:
            style = ALONE
        row = Text()
        blocks = spark(line.y, room, min(values), max(values), symbols)
        row.append(blocks.ljust(room), style)
        last = line.y[-1]
        if chart.score is None:
            row.append(f" {number(last, chart.digits)} ")
            row.append(chart.short)
        else:
            digits = 1 + chart.score.decimals
            row.append(f" {number(last, digits, chart.score.unit)} ")
            row.append(line.name, style)
            if place == 0:
                row.append(f", {chart.short}")
                if shown[-1].reference:
                    row.append(f": {number(last - shown[-1].y[-1], digits, chart.score.gap, sign=True)}")
        yield row


def spark(values: Sequence[float], width: int, low: float, high: float, symbols: str = BLOCKS) -> str:
    """Returns the values as blocks between ``low`` and ``high``, squeezed into ``width`` characters; "" without any."""
    columns = min(width, len(values))
    highest = len(symbols) - 1
    step = (high - low) / highest
    line = ""
    for column in range(columns):
        # The last of the values that share this column.
        value = values[(column + 1) * len(values) // columns - 1]
        height = 0
        if step > 0 and math.isfinite(value):
            height = round((value - low) / step)
        line += symbols[min(highest, max(0, height))]
    return line


def _table(table: Table) -> list[RenderableType]:
    if not table.rows:
        return [text(table.words)]
    grid = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    columns = table.columns or range(len(table.heads))
    for place in columns:
        grid.add_column(clean(table.heads[place]))
    for row in table.rows[:MAX_ROWS]:
        grid.add_row(*(text(str(row[place])) for place in columns))
    lines: list[RenderableType] = [grid]
    if len(table.rows) > MAX_ROWS:
        lines.append(Text(f"and {len(table.rows) - MAX_ROWS} more"))
    if table.words:
        lines.append(Text(clean(table.words, MAX_LINE), "dim"))
    return lines


def _bar(view: RunView, width: int) -> list[Text]:
    """All slots of this round as one bar, coloured by stage, and the number of seeds in each stage."""
    counts = view.stages
    total = sum(counts.values())
    if not total:
        return []
    room = max(8, min(60, width - 2))
    bar = Text()
    names = Text()
    planted = 0
    for stage, word in STAGE_WORDS.items():
        seeds = counts[stage]
        if not seeds:
            continue
        # The ends of parts are rounded, not their lengths, which then add up.
        planted += seeds
        end = round(room * planted / total)
        style = f"black on {STAGE_COLORS[stage]}"
        bar.append(word[0].upper() * (end - len(bar)), style)
        names.append(f" {seeds} ", style)
        names.append(f" {word}  ")
    bar.append("." * (room - len(bar)), "dim")
    names.append(f"{total - planted} free", "dim")
    return [bar, names]


def _hosts(view: RunView) -> list[Text]:
    """Each host of this round, with the contents of its slots."""
    lines = []
    for env, epoch in sorted(view.hosts.items())[:MAX_HOSTS]:
        line = Text(f"host {env:<3d}")
        for slot, stage in epoch.stages.items():
            seed = "-"
            style = "dim"
            if stage in STAGE_WORDS:
                seed = f"{view.planted.get((env, slot), 'seed')} {STAGE_WORDS[stage]}"
                style = f"black on {STAGE_COLORS[stage]}"
            line.append(f" {clean(slot, 24)} ")
            line.append(clean(seed, 40), style)
        lines.append(line)
    if len(view.hosts) > MAX_HOSTS:
        lines.append(Text(f"and {len(view.hosts) - MAX_HOSTS} more hosts"))
    return lines
