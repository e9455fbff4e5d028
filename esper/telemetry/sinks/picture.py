"""The parts of the live view: progress, curves, slots, what is planted, and the agent, for any width of terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.telemetry import status
from esper.telemetry.run_view import RunView
from esper.telemetry.stages import STAGE_COLORS, STAGE_WORDS
from esper.telemetry.text import clean, duration, number
from esper.telemetry.workload import Workload

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.,-=+*#"
HEAD = 12
WIDE = 140
"""Columns from which parts stand side by side."""
GROWN, ALONE = "bold #009e73", "#888888"


def spark(values: Sequence[float], width: int, low: float, high: float, blocks: str = BLOCKS) -> str:
    """Returns the values as blocks between ``low`` and ``high``, squeezed into ``width`` characters; "" without any."""
    columns = min(width, len(values))
    shown = [values[(column + 1) * len(values) // columns - 1] for column in range(columns)]
    step = (high - low) / (len(blocks) - 1)
    heights = [round((value - low) / step) if step > 0 and math.isfinite(value) else 0 for value in shown]
    return "".join(blocks[min(len(blocks) - 1, max(0, height))] for height in heights)


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
    row = Table.grid(padding=(0, 2))
    remaining = "estimating the rest" if left is None else f"about {duration(left)} left"
    bar = ProgressBar(total=1.0, completed=work.part, width=max(10, min(60, width - 44)))
    row.add_row(bar, Text(f"{work.part:4.0%}  {duration(work.elapsed)} so far, {remaining}", no_wrap=True))
    return [row, phases(view, work)]


def phases(view: RunView, work: Workload) -> Text:
    """The phases of the run in their order: done, under way, to come."""
    line = Text()
    for name, phase in work.phases.items():
        words, numbered = name, name == "rounds" and view.rounds > 0
        if numbered:
            words = f"round {min(view.done + 1, view.rounds)}/{view.rounds}" if phase.done else f"{view.rounds} rounds"
        style = "dim"
        if not phase.left:
            words, style = f"{name} done", "green"
        elif name == work.current:
            style = "bold cyan"
            if not numbered:
                words = f"{name} {phase.done / phase.total:.0%}"
        line.append(f"{' > ' if line else ''}", "dim").append(words, style)
    return line


def curves(view: RunView, width: int, blocks: str) -> list[Text]:
    """The accuracy, or other score, with and without growth: by epoch of this round, and by round."""
    lines: list[Text] = []
    room = max(8, min(40, width - HEAD - 50))
    grown, alone = view.curve, view.alone_curve
    if grown:
        epoch = max(view.curve_epochs)
        lines += _pair(view, f"epoch {epoch}, validation", grown, alone if view.alone else [], room, blocks)
    rounds = list(view.completed)
    if rounds:
        tested = rounds[-1].test_accuracy is not None and rounds[-1].alone_test_accuracy is not None
        pairs = [
            (e.test_accuracy, e.alone_test_accuracy) if tested else (e.committed_accuracy, e.baseline_accuracy)
            for e in rounds
        ]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        others = [b for _, b in known] if view.alone or tested else []
        label = f"round {rounds[-1].round}, {'test' if tested else 'validation'}"
        lines += _pair(view, label, [a for a, _ in known], others, room, blocks)
    return lines


def _pair(
    view: RunView, label: str, grown: Sequence[float], alone: Sequence[float], room: int, blocks: str
) -> list[Text]:
    low, high = min((*grown, *alone)), max((*grown, *alone))
    score = view.score
    lines = [
        Text.assemble(
            (f"{spark(grown, room, low, high, blocks):{room}s}", GROWN),
            f" {score.value(grown[-1], 1)} ",
            ("grown", GROWN),
            f", {label}" + (f": {score.difference(grown[-1] - alone[-1], 1)}" if alone else ""),
        )
    ]
    if alone:
        shown = f"{spark(alone, room, low, high, blocks):{room}s}"
        lines.append(Text.assemble((shown, ALONE), f" {score.value(alone[-1], 1)} ", ("without growth", ALONE)))
    return lines


def slots(view: RunView, width: int, ascii_only: bool) -> list[Text]:
    """All slots of this round as one bar, coloured by stage, and the number of seeds in each stage."""
    counts = view.stages
    total = sum(counts.values())
    if not total:
        return []
    room = max(8, min(60, width - HEAD - 2))
    bar, names = Text(), Text()
    shares = [(stage, counts[stage]) for stage in STAGE_WORDS if counts[stage]]
    ends = [round(room * end / total) for end in accumulate(seeds for _, seeds in shares)]
    start = 0
    for (stage, seeds), end in zip(shares, ends, strict=True):
        bar.append(STAGE_WORDS[stage][0].upper() * (end - start), f"black on {STAGE_COLORS[stage]}")
        names.append(f"{'  ' if names else ''}").append(f" {seeds} ", f"black on {STAGE_COLORS[stage]}")
        names.append(f" {STAGE_WORDS[stage]}")
        start = end
    free = total - sum(seeds for _, seeds in shares)
    bar.append(("." if ascii_only else "·") * (room - start), "dim")
    return [bar, names.append(f"{'  ' if names else ''}{free} free", "dim")]


def hosts(view: RunView, most: int = status.MAX_HOSTS) -> list[Text]:
    """Each host of this round: its seeds, coloured by stage."""
    lines = []
    for env, epoch in sorted(view.hosts.items())[:most]:
        line = Text(f"host {env:<3d}")
        for slot, stage in epoch.stages.items():
            seed = (view.planted.get((env, slot)) or "seed") if stage in STAGE_WORDS else "-"
            style = f"black on {STAGE_COLORS[stage]}" if stage in STAGE_WORDS else "dim"
            line.append(f" {clean(seed, 12):12s}", style).append(" ")
        lines.append(line)
    return lines


def agent(view: RunView, width: int, blocks: str) -> list[Text]:
    """The last update of the agent, with the history of each figure."""
    updates = list(view.updates)
    if not updates:
        return []
    history: dict[str, list[float]] = {
        "return": [event.mean_return for event in view.completed],
        "entropy": [update.entropy for update in updates],
        "KL": [update.approx_kl for update in updates],
        "clipped": [update.clip_fraction for update in updates],
        "expl. var.": [update.explained_variance for update in updates],
    }
    columns = max(1, min(len(history), (width - HEAD) // 33))
    cells = []
    for name, values in history.items():
        if values:
            line = spark(values, 12, min(values), max(values), blocks)
            cells.append(f"{name:10s} {line:12s} {number(values[-1], 3):>8s}")
    return [Text("  ".join(cells[start : start + columns])) for start in range(0, len(cells), columns)]


def plain(head: str, lines: Iterable[str]) -> tuple[str, list[Text]]:
    return head, [Text(clean(line, status.MAX_LINE)) for line in lines]
