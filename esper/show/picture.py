"""The parts of the live view: progress, curves, slots, what is planted, and the agent, for any width of terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.show import status
from esper.show.run_view import RunView
from esper.show.stages import STAGE_COLORS, STAGE_WORDS
from esper.telemetry.text import clean, duration, number
from esper.telemetry.workload import Workload

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.,-=+*#"
HEAD = 12
WIDE = 140
"""Columns from which parts stand side by side."""
FIGURES = {
    "entropy": "entropy",
    "KL": "approx_kl",
    "clipped": "clip_fraction",
    "expl. var.": "explained_variance",
}
"""Figures of an update that are shown, and their fields."""
GROWN = "bold #009e73"
ALONE = "#888888"


def spark(values: Sequence[float], width: int, low: float, high: float, blocks: str = BLOCKS) -> str:
    """Returns the values as blocks between ``low`` and ``high``, squeezed into ``width`` characters; "" without any."""
    columns = min(width, len(values))
    highest = len(blocks) - 1
    step = (high - low) / highest
    line = ""
    for column in range(columns):
        # The last of the values that share this column.
        value = values[(column + 1) * len(values) // columns - 1]
        height = 0
        if step > 0 and math.isfinite(value):
            height = round((value - low) / step)
        line += blocks[min(highest, max(0, height))]
    return line


def part(head: str, lines: Iterable[Text]) -> Table:
    """Returns a heading with its lines; a line that is too long wraps between words, beside its heading."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(width=HEAD - 1, style="bold", no_wrap=True)
    table.add_column(ratio=1)
    for place, line in enumerate(lines):
        table.add_row("" if place else head, line)
    return table


def progress(view: RunView, work: Workload, width: int) -> list[Table | Text]:
    """The part of the run that is done, the time that the rest takes, and the phases of the run."""
    left = work.seconds_left()
    remaining = "estimating the rest" if left is None else f"about {duration(left)} left"
    bar = ProgressBar(total=1.0, completed=work.part, width=max(10, min(60, width - 44)))
    words = f"{work.part:4.0%}  {duration(work.elapsed)} so far, {remaining}"
    row = Table.grid(padding=(0, 2))
    row.add_row(bar, Text(words, no_wrap=True))
    return [row, phases(view, work)]


def phases(view: RunView, work: Workload) -> Text:
    """The phases of the run in their order: done, under way, to come."""
    line = Text()
    for name, phase in work.phases.items():
        style = "dim"
        if not phase.left:
            style = "green"
        elif name == work.current:
            style = "bold cyan"
        if line:
            line.append(" > ", "dim")
        line.append(_phase(view, work, name), style)
    return line


def _phase(view: RunView, work: Workload, name: str) -> str:
    """Returns the name of a phase, and how far it is."""
    phase = work.phases[name]
    if not phase.left:
        return f"{name} done"
    if name == "rounds" and view.rounds > 0:
        if not phase.done:
            return f"{view.rounds} rounds"
        return f"round {min(view.done + 1, view.rounds)}/{view.rounds}"
    if name == work.current:
        return f"{name} {phase.done / phase.total:.0%}"
    return name


def curves(view: RunView, width: int, blocks: str) -> list[Text]:
    """The accuracy, or other score, with and without growth: by epoch of this round, and by round."""
    lines: list[Text] = []
    room = max(8, min(40, width - HEAD - 50))
    grown = view.curve
    if grown:
        label = f"epoch {max(view.curve_epochs)}, validation"
        alone = view.alone_curve if view.alone else []
        lines += _pair(view, label, grown, alone, room, blocks)
    if view.completed:
        last = view.completed[-1]
        tested = last.test_accuracy is not None and last.alone_test_accuracy is not None
        if tested:
            label = f"round {last.round}, test"
            grown, alone = _tests(view)
        else:
            label = f"round {last.round}, validation"
            grown = [event.committed_accuracy for event in view.completed]
            alone = [event.baseline_accuracy for event in view.completed] if view.alone else []
        lines += _pair(view, label, grown, alone, room, blocks)
    return lines


def _tests(view: RunView) -> tuple[list[float], list[float]]:
    """Returns the test accuracies of grown hosts and of hosts left alone, of the rounds that have both."""
    grown = []
    alone = []
    for event in view.completed:
        if event.test_accuracy is not None and event.alone_test_accuracy is not None:
            grown.append(event.test_accuracy)
            alone.append(event.alone_test_accuracy)
    return grown, alone


def _pair(
    view: RunView,
    label: str,
    grown: Sequence[float],
    alone: Sequence[float],
    room: int,
    blocks: str,
) -> list[Text]:
    """Two curves on one scale, each with its last value; ``alone`` may be empty."""
    low = min((*grown, *alone))
    high = max((*grown, *alone))
    score = view.score
    line = Text()
    line.append(spark(grown, room, low, high, blocks).ljust(room), GROWN)
    line.append(f" {score.value(grown[-1], 1)} ")
    line.append("grown", GROWN)
    line.append(f", {label}")
    if not alone:
        return [line]
    line.append(f": {score.difference(grown[-1] - alone[-1], 1)}")
    below = Text()
    below.append(spark(alone, room, low, high, blocks).ljust(room), ALONE)
    below.append(f" {score.value(alone[-1], 1)} ")
    below.append("without growth", ALONE)
    return [line, below]


def slots(view: RunView, width: int, ascii_only: bool) -> list[Text]:
    """All slots of this round as one bar, coloured by stage, and the number of seeds in each stage."""
    counts = view.stages
    total = sum(counts.values())
    if not total:
        return []
    room = max(8, min(60, width - HEAD - 2))
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
        if names:
            names.append("  ")
        names.append(f" {seeds} ", style)
        names.append(f" {word}")
    dot = "." if ascii_only else "·"
    bar.append(dot * (room - len(bar)), "dim")
    gap = "  " if names else ""
    names.append(f"{gap}{total - planted} free", "dim")
    return [bar, names]


def hosts(view: RunView, most: int = status.MAX_HOSTS) -> list[Text]:
    """Each host of this round: its seeds, coloured by stage."""
    lines = []
    for env, epoch in sorted(view.hosts.items())[:most]:
        line = Text(f"host {env:<3d}")
        for slot, stage in epoch.stages.items():
            seed = "-"
            style = "dim"
            if stage in STAGE_WORDS:
                seed = view.planted.get((env, slot)) or "seed"
                style = f"black on {STAGE_COLORS[stage]}"
            line.append(f" {clean(seed, 12):12s}", style)
            line.append(" ")
        lines.append(line)
    return lines


def agent(view: RunView, width: int, blocks: str) -> list[Text]:
    """The last update of the agent, with the history of each figure."""
    if not view.updates:
        return []
    history: dict[str, list[float]] = {"return": [event.mean_return for event in view.completed]}
    for name, field in FIGURES.items():
        history[name] = [getattr(update, field) for update in view.updates]
    cells = []
    for name, values in history.items():
        if values:
            line = spark(values, 12, min(values), max(values), blocks)
            cells.append(f"{name:10s} {line:12s} {number(values[-1], 3):>8s}")
    # A cell takes 33 characters with the space behind it.
    columns = max(1, min(len(history), (width - HEAD) // 33))
    return [Text("  ".join(cells[start : start + columns])) for start in range(0, len(cells), columns)]


def plain(head: str, lines: Iterable[str]) -> tuple[str, list[Text]]:
    """Returns a heading and its lines as text of the view."""
    return head, [Text(clean(line, status.MAX_LINE)) for line in lines]
