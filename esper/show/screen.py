"""The view of a run in a terminal, while it is at work and by `esper show`: headings, each with lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.show.console import incident, rates, validated
from esper.show.view import STAGE_COLORS, STAGE_WORDS, RunView, phase_seconds
from esper.telemetry import event as events
from esper.telemetry.memory import memory_words
from esper.telemetry.text import clean, duration, number, shorten

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.,-=+*#"
HEAD = 13
"""Columns of headings."""
MAX_LINE = 500
MAX_BLUEPRINTS = 8
MAX_HOSTS = 16
MAX_SLOTS = 8
MAX_WORTHS = 3
"""Blueprints listed of each slot, the best ones."""
MIN_SHARE = 0.005
"""Phases with a smaller share of the time are not listed."""
FIGURES = {
    "entropy": "entropy",
    "KL": "approx_kl",
    "clipped": "clip_fraction",
    "expl. var.": "explained_variance",
}
"""Figures of an update that are shown, and their fields."""
GROWN = "bold #009e73"
ALONE = "#888888"

Section = tuple[str, Sequence[str | Text]]
"""A heading and its lines; it is not shown without lines."""


def picture(view: RunView, console: Console, head: Iterable[RenderableType]) -> Group:
    """Returns the view for a terminal, below the lines ``head``."""
    found = sections(view, console.width, console.options.ascii_only)
    # Last, so that the ^C of an interrupt is not echoed behind a full line: it would wrap, and the view scroll.
    end = Text("")
    return Group(*head, *parts(found), end)


def parts(found: Iterable[Section]) -> list[Table]:
    """Returns the sections as blocks; a line that is too long wraps between words, beside its heading."""
    blocks = []
    for head, lines in found:
        block = Table.grid(padding=(0, 1), expand=True)
        block.add_column(width=HEAD - 1, style="bold", no_wrap=True)
        block.add_column(ratio=1)
        for place, line in enumerate(lines):
            block.add_row("" if place else head, _text(line))
        if lines:
            blocks.append(block)
    return blocks


def plain(found: Iterable[Section]) -> str:
    """Returns the sections for a pipe or a file: no line wraps, and there are no control codes."""
    shown = []
    for head, lines in found:
        for line in lines:
            shown.append(f"{head:{HEAD}s}{_text(line).plain}".rstrip())
            head = ""
    return "\n".join(shown)


def _text(line: str | Text) -> Text:
    if isinstance(line, Text):
        return line
    return Text(clean(line, MAX_LINE))


def sections(view: RunView, width: int, ascii_only: bool) -> list[Section]:
    """Returns all sections for ``width`` columns, most important first: a terminal may have no room for the last."""
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    return [
        (shorten(view.score.name, HEAD - 2), accuracy(view, width, blocks)),
        ("verdict", verdict(view)),
        ("slots", slots(view, width)),
        ("warnings", warnings(view)),
        ("worth", worths(view)),
        ("agent", agent(view, width, blocks)),
        ("time", time(view)),
        ("blueprints", blueprints(view)),
        ("hosts", hosts(view)),
        ("memory", memory(view)),
        ("last events", [": ".join(filter(None, incident(event))) for event in view.recent]),
    ]


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


def progress(view: RunView, width: int) -> list[RenderableType]:
    """The phase of the run, the part of it that is done, and the time that the rest of the phase takes."""
    pace = view.pace
    phase = pace.phase or "start"
    if phase == "rounds" and view.rounds > 0:
        phase = f"round {min(view.done + 1, view.rounds)}/{view.rounds}"
    left = pace.seconds_left()
    remaining = "estimating the rest" if left is None else f"about {duration(left)} left"
    bar = ProgressBar(total=1.0, completed=pace.part, width=max(10, min(60, width - 52)))
    words = f"{phase} {pace.part:4.0%}  {duration(pace.elapsed)} so far, {remaining}"
    row = Table.grid(padding=(0, 2))
    row.add_row(bar, Text(words, no_wrap=True))
    return [row]


def accuracy(view: RunView, width: int, blocks: str) -> list[Text]:
    """The accuracy, or other score, with and without growth: by epoch of this round, and by round."""
    lines: list[Text] = []
    grown = view.curve("validation_accuracy")
    if grown:
        alone = view.curve("baseline_accuracy") if view.has_baseline else []
        lines += _pair(view, f"epoch {max(view.epochs)}, validation", grown, alone, width, blocks)
    last = view.last(events.RoundCompleted)
    if last is not None:
        split = view.compared(last).split
        rounds = [found for found in map(view.compared, view.of(events.RoundCompleted)) if found.split == split]
        grown = [found.grown for found in rounds]
        alone = [found.other for found in rounds if found.other is not None]
        lines += _pair(view, f"round {last.round}, {split}", grown, alone, width, blocks)
        words = f"return {number(last.mean_return, 3, sign=True)}, {number(last.fossils, 1)} fossils per host"
        lines.append(Text(f"round {last.round}: {words}"))
    return lines


def _pair(
    view: RunView,
    label: str,
    grown: Sequence[float],
    alone: Sequence[float],
    width: int,
    blocks: str,
) -> list[Text]:
    """Two curves on one scale, each with its last value; ``alone`` may be empty."""
    room = max(8, min(40, width - HEAD - 50))
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


def verdict(view: RunView) -> list[str]:
    """The comparison of the run's controller with others."""
    completed = view.last(events.RunCompleted)
    if completed is None:
        return []
    if not completed.comparisons:
        return ["nothing was compared"]
    difference = view.score.difference
    lines = []
    for comparison in completed.comparisons:
        low = difference(comparison.low, unit=False)
        high = difference(comparison.high, unit=False)
        words, _, _ = comparison.verdict.partition(" (")  # figures follow, which are shown already
        lines.append(
            f"{clean(comparison.reference, 24):10s} {difference(comparison.difference)}, 95 % interval "
            f"{low} to {high}: {words}"
        )
    return lines


def slots(view: RunView, width: int) -> list[Text]:
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
        names.append(f" {seeds} ", style)
        names.append(f" {word}  ")
    bar.append("." * (room - len(bar)), "dim")
    names.append(f"{total - planted} free", "dim")
    return [bar, names]


def hosts(view: RunView) -> list[str | Text]:
    """Each host of this round, with the contents of its slots."""
    lines: list[str | Text] = []
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
    return [*lines, *_rest(len(view.hosts), MAX_HOSTS, "hosts")]


def _rest(count: int, most: int, things: str) -> list[str]:
    """Returns the line that says how many of ``count`` things are not listed; [] if all are."""
    if count <= most:
        return []
    return [f"and {count - most} more {things}"]


def blueprints(view: RunView) -> list[str]:
    """The fate of the most planted blueprints, over all rounds."""
    rows = view.blueprints.rows()
    name = view.score.name
    lines = []
    meaning = []
    for row in rows[:MAX_BLUEPRINTS]:
        kept = f"{row.fossilized:,} kept"
        if row.contribution_kept is not None:
            kept += f" (contribution {view.score.difference(row.contribution_kept)})"
            # Explained once, if any contribution is shown.
            meaning = [
                f"contribution: {name} with the seed minus {name} without it when it was kept, mean: how much hosts "
                "lean on it, which is more than what planting it won"
            ]
        removed = f"{row.pruned + row.cut + row.rolled_back:,} removed, {row.living:,} unfinished"
        lines.append(f"{clean(row.blueprint, 24):14s} {row.germinated:,} planted, {kept}, {removed}")
    return lines + _rest(len(rows), MAX_BLUEPRINTS, "blueprints") + meaning


def worths(view: RunView) -> list[str]:
    """The blueprints that are worth most in each slot where one was kept, by the experience of all rounds."""
    estimated = view.last(events.WorthsEstimated)
    if estimated is None or not estimated.episodes:
        return []
    score = view.score
    lines = []
    for slot, row in islice(estimated.worths.items(), MAX_SLOTS):
        # By the estimated worth, of those that were kept at least once.
        kept = [(*worth, name) for name, worth in row.items() if worth[2]]
        kept.sort(reverse=True)
        seeds = []
        for mean, error, times, name in kept[:MAX_WORTHS]:
            worth = f"{score.difference(mean, 1)} ± {score.value(error, 1, unit=False)}"
            seeds.append(f"{clean(name, 24)} {worth} (kept {times}x)")
        if seeds:
            lines.append(f"{clean(slot, 24)}: {', '.join(seeds)}")
    lines += _rest(len(estimated.worths), MAX_SLOTS, "slots")
    lines.append(
        f"what a kept seed adds to the final {score.name}, estimate ± error over {estimated.episodes:,} episodes"
    )
    return lines


def agent(view: RunView, width: int, blocks: str) -> list[str]:
    """The last update of the agent, with the history of each figure."""
    updates = view.of(events.PolicyUpdated)
    if not updates:
        return []
    history = {"return": [event.mean_return for event in view.of(events.RoundCompleted)]}
    for name, field in FIGURES.items():
        history[name] = [getattr(update, field) for update in updates]
    cells = []
    for name, values in history.items():
        if values:
            line = spark(values, 12, min(values), max(values), blocks)
            cells.append(f"{name:10s} {line:12s} {number(values[-1], 3):>8s}")
    # A cell takes 33 characters with the space behind it.
    columns = max(1, min(len(history), (width - HEAD) // 33))
    lines = ["  ".join(cells[start : start + columns]) for start in range(0, len(cells), columns)]
    last = updates[-1]
    stopped = ", stopped early" if last.stopped_early else ""
    entropies = ", ".join(f"{name} {number(value)}" for name, value in last.head_entropies.items())
    lines += [
        f"round {last.round}: {last.minibatches} minibatches{stopped}, gradient norm {number(last.gradient_norm)}, "
        f"learning rate {last.learning_rate:.1e}, {last.env_steps:,} env steps",
        f"entropy by head: {entropies}",
    ]
    validation = view.last(events.AgentValidated)
    if validation is not None:
        lines.append(validated(validation))
    return lines


def warnings(view: RunView) -> list[str]:
    """Anomalies of learning, with advice."""
    lines = []
    for times, event in view.warnings():
        when = f"round {event.round}"
        if times > 1:
            when += f", {times} times"
        lines.append(f"{when}: {event.found}; try: {event.advice}")
    return lines


def time(view: RunView) -> list[str]:
    """The duration of the last round, the share of each phase, largest first, and its throughput."""
    last = view.last(events.RoundCompleted)
    if last is None:
        return []
    phases = phase_seconds(last)
    total = sum(phases.values()) or 1.0
    shares = []
    for name, seconds in sorted(phases.items(), key=lambda phase: -phase[1]):
        share = seconds / total
        if share >= MIN_SHARE:
            shares.append(f"{name} {share:.0%}")
    line = f"round {last.round}: {duration(last.seconds)}"
    if shares:
        line += f": {', '.join(shares)}"
    return [line, rates(last)]


def memory(view: RunView) -> list[str]:
    """Bytes in use at the end of the last round, a line for each GPU and for CPU memory."""
    last = view.last(events.RoundCompleted)
    if last is None:
        return []
    return memory_words(last.memory)
