"""Growth: what was planted, its fate, and what it contributed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from esper.report.charts import MAX_LANES, IntervalRow, Line, interval_chart, lanes_chart, line_figure
from esper.report.curves import NORMAL, by_epoch, mean, score_of, shown_epochs
from esper.report.html import figure, figures, heading, note, section, table
from esper.report.read import Run
from esper.telemetry.event import EpisodeCompleted, RunStarted, StageChanged, WorthsEstimated
from esper.telemetry.seed_history import Life
from esper.telemetry.stages import STAGE_MEANINGS
from esper.telemetry.text import count, number

MAX_LIVES = 240
"""Max hosts whose slots are drawn, over all runs."""
MAX_SLOTS = 24
MAX_INTERVALS = 40
COUNTS = {
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


def lives_section(runs: Sequence[Run]) -> str:
    """Lanes of the slots round by round, the newest one open, followed by the fate of each blueprint."""
    parts = [
        table(["stage", "meaning"], [[stage.lower(), words] for stage, words in STAGE_MEANINGS.items()], style="facts")
    ]
    for run in runs:
        parts += [heading(run.name, len(runs) > 1), _lanes(run, MAX_LIVES // len(runs)), blueprint_table(run)]
        parts.append(worth_table(run))
    return section("slots", "Slot lifecycles", *parts)


def _lanes(run: Run, max_lives: int) -> str:
    rounds: dict[int, list[Life]] = defaultdict(list)
    for (episode, _), life in sorted(run.lives.items()):
        rounds[episode].append(life)
    if not rounds:
        return note("No epochs and no slot changes were logged.")
    slots = run.slots
    max_hosts = max(1, min(max_lives, MAX_LANES // max(1, min(MAX_SLOTS, len(slots)))))
    parts: list[str] = []
    drawn = 0
    for episode in sorted(rounds, reverse=True):
        shown = rounds[episode][:max_hosts]
        if drawn and drawn + len(shown) > max_lives:
            break
        parts.append(_lanes_of_round(run, episode, shown, slots[:MAX_SLOTS], is_open=not drawn))
        drawn += len(shown)
    words = "Each lane is a slot and each bar a seed, named after its blueprint; colours are stages."
    total = sum(map(len, rounds.values()))
    if drawn < total:
        words += f" Only {drawn:,} of {total:,} hosts are drawn, those of the newest rounds."
    if len(slots) > MAX_SLOTS:
        words += f" Only the first {MAX_SLOTS} of {len(slots)} slots are drawn."
    return note(words) + "".join(parts)


def _lanes_of_round(run: Run, episode: int, hosts: Sequence[Life], slots: Sequence[str], is_open: bool) -> str:
    started = run.last(RunStarted)
    title = f"{run.name}: slots in round {episode + 1}"
    heads = ["host", "slot", "seed", "stage", "from epoch", "to epoch", "cause"]
    rows = [
        [f"host {life.env}", s.slot, s.blueprint or "", s.stage.lower(), s.begin, s.end, s.cause]
        for life in hosts
        for s in life.stretches
    ]
    return (
        f"<details class=round{' open' if is_open else ''}>"
        f"<summary>Round {episode + 1}, {count(len(hosts), 'host')}</summary><figure class=scroll>"
        f"{lanes_chart(title, hosts, slots, started.episode_length if started else 1)}"
        f"<details><summary>Numbers</summary>{table(heads, rows)}</details></figure></details>"
    )


def worth_table(run: Run) -> str:
    """The worth of each blueprint in each slot, by the experience of the run; empty if it has none."""
    found = run.last(WorthsEstimated)
    if found is None or not found.episodes:
        return ""
    score = run.view.score
    cells = [
        [slot, name, score.difference(mean, unit=False), score.difference(error, unit=False).lstrip("+"), f"{kept:,}"]
        for slot, row in found.worths.items()
        for name, (mean, error, kept) in row.items()
    ]
    heads = ["slot", "blueprint", score.gap_label("worth"), score.gap_label("error"), "kept"]
    caption = f"What a kept seed adds to the final {score.name}, estimated from {found.episodes:,} episodes"
    return table(heads, cells, caption)


def blueprint_table(run: Run) -> str:
    """The number of times that each blueprint was planted, its fate, and its value if it was kept."""
    score = run.view.score
    values: dict[str, list[float]] = defaultdict(list)
    for episode in run.of(EpisodeCompleted):
        for slot, (value, _) in episode.shapley.items():
            if slot in episode.fossils:
                values[episode.fossils[slot]].append(value)
    rows = run.view.blueprints.rows()
    if len(rows) > 1:
        rows.append(run.view.blueprints.total())
        values[rows[-1].blueprint] = [value for own in list(values.values()) for value in own]
    cells = [
        [
            row.blueprint,
            *(f"{getattr(row, name):,}" for name in COUNTS.values()),
            score.difference(row.contribution_kept, unit=False),
            score.difference(row.contribution_pruned, unit=False),
            score.difference(mean(values[row.blueprint]), unit=False),
            number(row.epochs_lived, 1),
            number(row.parameters, 0),
        ]
        for row in rows
    ]
    measured = map(score.gap_label, ("contribution kept", "contribution pruned", "Shapley value kept"))
    means = [*measured, "epochs lived", "parameters"]
    caption = "Seeds by blueprint, over all rounds; the last five columns are means"
    return table(["blueprint", *COUNTS, *means], cells, caption)


def contributions_section(runs: Sequence[Run]) -> str:
    name = score_of(runs).name
    parts = [
        note(
            f"The contribution of a seed is the {name} with it minus the {name} with its alpha forced to 0, on the "
            "same validation images: how much the grown host leans on it. What planting it won is less, because a host "
            "that learned without the seed would do better than this one does when it is taken away; the summary has "
            "what growing won, beside the same hosts left alone. If seeds depend on each other, their contributions "
            "overlap; Shapley values divide the joint gain among them."
        )
    ]
    for run in runs:
        parts.append(heading(run.name, len(runs) > 1))
        parts.append(figures(slots_figure(run), seeds_figure(run), shapley_figure(run)))
    return section("contributions", "Contributions", *parts)


def slots_figure(run: Run) -> str:
    """Mean contribution of the seed in each slot, by epoch."""
    epochs, words = shown_epochs(run)
    lines, score = [], run.view.score
    for place, slot in enumerate(run.slots[:8]):
        curve = by_epoch(epochs, lambda e, slot=slot: e.contributions.get(slot))  # type: ignore[misc]
        if curve.x:
            low, high = (
                [score.of(mean + side * NORMAL * error) for mean, error in zip(curve.mean, curve.error, strict=True)]
                for side in (-1, 1)
            )
            lines.append(Line(slot, curve.x, [score.of(mean) for mean in curve.mean], place, low, high))
    if not lines:
        return note("No contribution was measured: no seed was blended.")
    about = f"Mean over the hosts of {words} with a blended seed in that slot. Shaded: 95 % interval of the mean."
    title = "Contribution by epoch"
    return line_figure(title, about, lines, "epochs done", score.gap_label("contribution"), include=[0.0])


def seeds_figure(run: Run) -> str:
    """Contribution of each seed at the last epoch of its host, in the newest round."""
    places = {slot: place for place, slot in enumerate(run.slots)}
    seeds = [
        (env, slot, last.contributions[slot], last.contribution_errors.get(slot))
        for env, last in sorted(run.view.hosts.items())
        for slot in sorted(last.contributions, key=lambda slot: places.get(slot, len(places)))
    ]
    unknown = sum(error is None for *_, error in seeds)
    newest = max(0, run.view.episode)
    words = f"Each blended seed of round {newest + 1} at the last epoch of its host, with its 95 % interval."
    if unknown:
        words += f" No interval for {unknown} of them: their standard errors were not logged."
    return _intervals(run, newest, seeds, "Contribution of each seed", words)


def shapley_figure(run: Run) -> str:
    """Shapley values of the newest round."""
    completed = run.of(EpisodeCompleted)
    newest = max((e.episode for e in completed), default=0)
    seeds = [(e.env, slot, *value) for e in completed if e.episode == newest for slot, value in e.shapley.items()]
    words = f"Share of each seed of round {newest + 1} in the joint gain of its host's seeds, with its 95 % interval."
    return _intervals(run, newest, seeds, "Shapley values", words)


def _intervals(
    run: Run, episode: int, seeds: Sequence[tuple[int, str, float, float | None]], title: str, words: str
) -> str:
    """Returns a chart of seeds, given as (env, slot, value, standard error) in pp; "" without seeds."""
    if not seeds:
        return ""
    planted = {(c.env, c.slot): c.blueprint for c in run.of(StageChanged) if c.episode == episode and c.blueprint}
    places = {slot: place for place, slot in enumerate(run.slots)}
    rows, score = [], run.view.score
    for env, slot, points, error in seeds:
        value = score.of(points)
        half = None if error is None or not math.isfinite(error) else NORMAL * score.of(error)
        low, high = (None, None) if half is None else (value - half, value + half)
        name = f"host {env} {slot} {planted.get((env, slot), '')}".strip()
        rows.append(IntervalRow(name, value, low, high, places.get(slot, len(places))))
    if len(rows) > MAX_INTERVALS:
        words += f" Only the first {MAX_INTERVALS} of {len(rows)} are drawn."
    digits = 2 + score.decimals
    ends = [["not measured"] * 2 if r.low is None else [number(r.low, digits), number(r.high, digits)] for r in rows]
    cells = [[r.name, number(r.value, digits, sign=True), *end] for r, end in zip(rows, ends, strict=True)]
    chart = interval_chart(title, rows[:MAX_INTERVALS], score.gap_label(score.name), score.gap)
    return figure(title, words, chart, table(["seed", score.gap or "contribution", "from", "to"], cells))
