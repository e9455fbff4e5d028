"""Growth: what was planted, what became of it, and what it contributed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from esper.report.bars import Interval, interval_chart
from esper.report.charts import Line, Plot, line_chart
from esper.report.curves import NORMAL, by_epoch, episodes, epochs_of, shown_rounds
from esper.report.figure import figure, figures, legend, lines_legend, lines_table, note, section, table
from esper.report.read import Run
from esper.report.svg import Ids
from esper.report.swim_lanes import MAX_SLOTS, STAGES, Life, lane_chart, lives, slots_of
from esper.report.text import escape, number
from esper.telemetry.event import EpisodeCompleted, EpochCompleted, StageChanged

MAX_LIVES = 240
"""Max hosts whose lanes are drawn, over all runs."""
MAX_INTERVALS = 40


def lives_section(ids: Ids, runs: Sequence[Run]) -> str:
    """Lanes of the slots round by round, the newest one open, followed by the fate of each blueprint."""
    parts = [legend((f"stage s-{stage.lower()}", words) for stage, words in STAGES.items())]
    for run in runs:
        if len(runs) > 1:
            parts.append(f"<h3>{escape(run.name)}</h3>")
        parts.append(_lanes(ids, run, MAX_LIVES // len(runs)))
        parts.append(blueprint_table(run))
    return section("slots", "Slot lifecycles", *parts)


def _lanes(ids: Ids, run: Run, most: int) -> str:
    every = lives(run)
    if not every:
        return note("No epochs and no slot changes were logged.")
    rounds: dict[int, list[Life]] = defaultdict(list)
    for life in every.values():
        rounds[life.episode].append(life)
    slots, length = slots_of(run), max(life.end for life in every.values())
    length = run.started.episode_length if run.started else length
    parts, drawn = [], 0
    for episode in sorted(rounds, reverse=True):
        if drawn and drawn + len(rounds[episode]) > most:
            break
        shown = rounds[episode][: max(1, most)]
        drawings = "".join(_lane_figure(ids, run, life, slots, length) for life in shown)
        opened = " open" if not drawn else ""
        hosts = "1 host" if len(shown) == 1 else f"{len(shown)} hosts"
        parts.append(
            f"<details class=round{opened}><summary>Round {episode + 1}, {hosts}</summary>"
            f"<div class=lanes>{drawings}</div></details>"
        )
        drawn += len(shown)
    words = "Each lane is a slot and each bar a seed; colours are stages. Hover over a bar for its details."
    if drawn < len(every):
        words += f" Only the newest {drawn:,} of {len(every):,} hosts are drawn."
    if len(slots) > MAX_SLOTS:
        words += f" Only the first {MAX_SLOTS} of {len(slots)} slots are drawn."
    return f"{note(words)}<div class=rounds>{''.join(parts)}</div>"


def _lane_figure(ids: Ids, run: Run, life: Life, slots: Sequence[str], length: int) -> str:
    title = f"Host {life.env}"
    full = f"{run.name}, round {life.episode + 1}, host {life.env}: slot lifecycles"
    return f"<figure><figcaption>{title}</figcaption>{lane_chart(ids, life, slots, length, full)}</figure>"


def blueprint_table(run: Run) -> str:
    """How often each blueprint was planted, what became of it, and its value if it was kept."""
    worth: dict[str, list[float]] = defaultdict(list)
    for episode in run.of(EpisodeCompleted):
        for slot, (value, _) in episode.shapley.items():
            if slot in episode.fossils and math.isfinite(value):
                worth[episode.fossils[slot]].append(value)
    found = run.blueprints.rows()
    if len(found) > 1:
        found.append(run.blueprints.total())
        worth[found[-1].blueprint] = [value for values in worth.values() for value in values]
    shapley = {name: sum(values) / len(values) for name, values in worth.items() if values}
    rows = [
        [
            row.blueprint,
            *(f"{getattr(row, name):,}" for name in COUNTED.values()),
            number(row.contribution_kept, sign=True),
            number(row.contribution_pruned, sign=True),
            number(shapley.get(row.blueprint), sign=True),
            number(row.epochs_lived, 1),
            number(row.parameters, 0),
        ]
        for row in found
    ]
    means = ["contribution kept, pp", "contribution pruned, pp", "Shapley value kept, pp", "epochs lived", "parameters"]
    heads = ["blueprint", *COUNTED, *means]
    return table(heads, rows, "Seeds by blueprint, over all rounds; the last five columns are means")


COUNTED = {
    "planted": "germinated",
    "blended": "blended",
    "kept": "fossilized",
    "pruned": "pruned",
    "cut": "cut",
    "rolled back": "rolled_back",
    "unfinished": "living",
    "refused": "rejected",
}
"""Heading of a column, and its count; see :class:`~esper.telemetry.analytics.BlueprintRow`."""


def contributions_section(ids: Ids, runs: Sequence[Run]) -> str:
    words = (
        "The contribution of a seed is the accuracy with it minus the accuracy with its alpha forced to 0, on the same "
        "validation images. If seeds depend on each other, their contributions overlap; Shapley values divide the "
        "joint gain among them."
    )
    parts = [note(words)]
    for run in runs:
        if len(runs) > 1:
            parts.append(f"<h3>{escape(run.name)}</h3>")
        parts.append(figures(slots_figure(ids, run), seeds_figure(ids, run), shapley_figure(ids, run)))
    return section("contributions", "Contributions", *parts)


def slots_figure(ids: Ids, run: Run) -> str:
    """Mean contribution of the seed in each slot, by epoch."""
    chosen, words = shown_rounds(run)
    epochs = epochs_of(run, chosen)
    lines = []
    for place, slot in enumerate(slots_of(run)[:8]):
        curve = by_epoch(epochs, lambda e, slot=slot: e.contributions.get(slot))  # type: ignore[misc]
        if curve.x:
            low, high = (
                [mean + side * NORMAL * error for mean, error in zip(curve.mean, curve.error, strict=True)]
                for side in (-1, 1)
            )
            lines.append(Line(slot, curve.x, curve.mean, place, low, high))
    if not lines:
        return note("No contribution was measured: no seed was blended.")
    about = f"Mean over the hosts of {words} with a blended seed in that slot. Shaded: 95 % interval of the mean."
    ends = "; ".join(f"{line.name} ends at {number(line.y[-1], sign=True)} pp" for line in lines)
    plot = Plot("Contribution by epoch", ends, "epochs done", "contribution, pp", "pp", zero=True)
    drawing = line_chart(ids, plot, lines)
    return figure(plot.title, about, drawing, lines_legend(lines), lines_table("epoch", lines))


def seeds_figure(ids: Ids, run: Run) -> str:
    """Contribution of each seed at the last epoch of its host, in the newest round."""
    hosts = episodes(run)
    if not hosts:
        return ""
    newest = max(episode for episode, _ in hosts)
    lived, slots = planted(run), slots_of(run)
    rows, bare = [], 0
    for (episode, env), epochs in hosts.items():
        if episode != newest:
            continue
        last = max(epochs, key=lambda e: e.epoch)
        for slot in sorted(last.contributions, key=lambda s: slots.index(s) if s in slots else len(slots)):
            error = last.contribution_errors.get(slot)
            bare += error is None
            name = f"host {env} {slot} {lived.get((episode, env, slot), '')}"
            rows.append(_interval(name, last.contributions[slot], error, _place(slots, slot)))
    if not rows:
        return ""
    words = f"Each blended seed of round {newest + 1} at the last epoch of its host, with its 95 % interval."
    if bare:
        words += f" No interval for {bare} of them: their standard errors were not logged."
    return _intervals(ids, "Contribution of each seed", words, rows)


def shapley_figure(ids: Ids, run: Run) -> str:
    """Shapley values of the newest round."""
    ended = run.of(EpisodeCompleted)
    lived, slots = planted(run), slots_of(run)
    newest = max((e.episode for e in ended), default=0)
    rows = [
        _interval(f"host {e.env} {slot} {lived.get((e.episode, e.env, slot), '')}", value, error, _place(slots, slot))
        for e in ended
        if e.episode == newest
        for slot, (value, error) in e.shapley.items()
    ]
    if not rows:
        return ""
    words = f"Share of each seed of round {newest + 1} in the joint gain of its host's seeds, with its 95 % interval."
    return _intervals(ids, "Shapley values", words, rows)


def planted(run: Run) -> dict[tuple[int, int, str], str]:
    """Returns the blueprint that was planted last, by (episode, env, slot)."""
    return {(c.episode, c.env, c.slot): c.blueprint for c in run.of(StageChanged) if c.blueprint is not None}


def _place(slots: Sequence[str], slot: str) -> int:
    return slots.index(slot) % 8 if slot in slots else 7


def _interval(name: str, value: float, error: float | None, colour: int) -> Interval:
    if error is None or not math.isfinite(error):
        return Interval(name.strip(), value, None, None, colour)
    return Interval(name.strip(), value, value - NORMAL * error, value + NORMAL * error, colour)


def _intervals(ids: Ids, title: str, words: str, rows: Sequence[Interval]) -> str:
    shown = rows[:MAX_INTERVALS]
    if len(rows) > len(shown):
        words += f" Only the first {len(shown)} of {len(rows)} are drawn."
    plot = Plot(title, "; ".join(row.words("pp") for row in shown), "accuracy, pp", "", "pp")
    ends = [["not measured"] * 2 if row.low is None else [number(row.low), number(row.high)] for row in rows]
    cells = [[row.name, number(row.value, sign=True), *end] for row, end in zip(rows, ends, strict=True)]
    numbers = table(["seed", "pp", "from", "to"], cells)
    return figure(title, words, interval_chart(ids, plot, shown), "", numbers)


def epoch_rewards(epochs: Sequence[EpochCompleted]) -> list[str]:
    """Returns the names of all reward terms, in the order in which they first appear."""
    return list(dict.fromkeys(name for epoch in epochs for name in epoch.reward_terms))
