"""Growth: what was planted, its fate, and what it contributed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from esper.show.charts import MAX_LANES, IntervalRow, Line, interval_chart, lanes_chart, line_figure
from esper.show.curves import NORMAL, by_epoch, mean, score_of, shown_epochs
from esper.show.html import figure, figures, heading, note, section, table
from esper.show.read import Run, Runs
from esper.telemetry.event import EpisodeCompleted, RunStarted, WorthsEstimated
from esper.telemetry.seed_history import Life
from esper.telemetry.text import count, number

STAGES = {
    "GERMINATED": "planted, not trained yet",
    "TRAINING": "incubated beside the host",
    "BLENDING": "its alpha is changing",
    "HOLDING": "fully blended, not kept yet",
    "FOSSILIZED": "kept for good",
    "PRUNED": "removed",
    "EMBARGOED": "the slot rests",
    "RESETTING": "the slot is almost free again",
}
"""Stages in which a slot is not free, in a few words."""
MAX_LIVES = 240
"""Max hosts whose slots are drawn, over all runs."""
MAX_SLOTS = 24
MAX_INTERVALS = 40
Seed = tuple[int, str, float, float | None]
"""Env and slot of a seed, and a value with its standard error, both in pp; the error is None if it is unknown."""
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


def lives_section(runs: Runs) -> str:
    """Lanes of the slots round by round, the newest one open, followed by the fate of each blueprint."""
    stages = [[stage.lower(), words] for stage, words in STAGES.items()]
    parts = [table(["stage", "meaning"], stages, style="facts")]
    for run in runs:
        parts.append(heading(run.name, len(runs) > 1))
        parts.append(_lanes(run, MAX_LIVES // len(runs)))
        parts.append(blueprint_table(run))
        parts.append(worth_table(run))
    return section("slots", "Slot lifecycles", *parts)


def _lanes(run: Run, max_lives: int) -> str:
    rounds: dict[int, list[Life]] = defaultdict(list)
    for (episode, _), life in sorted(run.view.lives.items()):
        rounds[episode].append(life)
    if not rounds:
        return note("No epochs and no slot changes were logged.")
    slots = run.view.slots
    shown_slots = slots[:MAX_SLOTS]
    max_hosts = min(max_lives, MAX_LANES // max(1, len(shown_slots)))
    parts: list[str] = []
    drawn = 0
    for episode in sorted(rounds, reverse=True):
        shown = rounds[episode][: max(1, max_hosts)]
        if drawn and drawn + len(shown) > max_lives:
            break
        parts.append(_lanes_of_round(run, episode, shown, shown_slots, is_open=not drawn))
        drawn += len(shown)
    words = "Each lane is a slot and each bar a seed, named after its blueprint; colours are stages."
    total = len(run.view.lives)
    if drawn < total:
        words += f" Only {drawn:,} of {total:,} hosts are drawn, those of the newest rounds."
    if len(slots) > MAX_SLOTS:
        words += f" Only the first {MAX_SLOTS} of {len(slots)} slots are drawn."
    return note(words) + "".join(parts)


def _lanes_of_round(
    run: Run,
    episode: int,
    hosts: Sequence[Life],
    slots: Sequence[str],
    is_open: bool,
) -> str:
    started = run.last(RunStarted)
    length = started.episode_length if started else 1
    chart = lanes_chart(f"{run.name}: slots in round {episode + 1}", hosts, slots, length)
    heads = ["host", "slot", "seed", "stage", "from epoch", "to epoch", "cause"]
    rows = []
    for life in hosts:
        for s in life.stretches:
            row = [f"host {life.env}", s.slot, s.blueprint or "", s.stage.lower(), s.begin, s.end, s.cause]
            rows.append(row)
    attribute = " open" if is_open else ""
    return (
        f"<details class=round{attribute}>"
        f"<summary>Round {episode + 1}, {count(len(hosts), 'host')}</summary><figure class=scroll>{chart}"
        f"<details><summary>Numbers</summary>{table(heads, rows)}</details></figure></details>"
    )


def worth_table(run: Run) -> str:
    """The worth of each blueprint in each slot, by the experience of the run; empty if it has none."""
    estimated = run.last(WorthsEstimated)
    if estimated is None or not estimated.episodes:
        return ""
    score = run.view.score
    rows = []
    for slot, worths in estimated.worths.items():
        for blueprint, (worth, error, kept) in worths.items():
            row = [
                slot,
                blueprint,
                score.difference(worth, unit=False),
                score.value(error, unit=False),
                f"{kept:,}",
            ]
            rows.append(row)
    heads = ["slot", "blueprint", score.gap_label("worth"), score.gap_label("error"), "kept"]
    caption = f"What a kept seed adds to the final {score.name}, estimated from {estimated.episodes:,} episodes"
    return table(heads, rows, caption)


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
        values[rows[-1].blueprint] = list(chain(*values.values()))
    cells = []
    for row in rows:
        counts = [f"{getattr(row, name):,}" for name in COUNTS.values()]
        cells.append(
            [
                row.blueprint,
                *counts,
                score.difference(row.contribution_kept, unit=False),
                score.difference(row.contribution_pruned, unit=False),
                score.difference(mean(values[row.blueprint]), unit=False),
                number(row.epochs_lived, 1),
                number(row.parameters, 0),
            ]
        )
    heads = [
        "blueprint",
        *COUNTS,
        score.gap_label("contribution kept"),
        score.gap_label("contribution pruned"),
        score.gap_label("Shapley value kept"),
        "epochs lived",
        "parameters",
    ]
    caption = "Seeds by blueprint, over all rounds; the last five columns are means"
    return table(heads, cells, caption)


def contributions_section(runs: Runs) -> str:
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
    score = run.view.score
    epochs, words = shown_epochs(run)
    lines = []
    for place, slot in enumerate(run.view.slots[:8]):
        curve = by_epoch(epochs, lambda e, slot=slot: e.contributions.get(slot))  # type: ignore[misc]
        if not curve.x:
            continue
        low = []
        high = []
        for center, error in zip(curve.mean, curve.error, strict=True):
            low.append(score.of(center - NORMAL * error))
            high.append(score.of(center + NORMAL * error))
        lines.append(Line(slot, curve.x, list(map(score.of, curve.mean)), place, low, high))
    if not lines:
        return note("No contribution was measured: no seed was blended.")
    about = f"Mean over the hosts of {words} with a blended seed in that slot. Shaded: 95 % interval of the mean."
    title = "Contribution by epoch"
    return line_figure(
        title,
        about,
        lines,
        "epochs done",
        score.gap_label("contribution"),
        include=[0.0],
    )


def seeds_figure(run: Run) -> str:
    """Contribution of each seed at the last epoch of its host, in the newest round."""
    seeds: list[Seed] = []
    for env, last in sorted(run.view.hosts.items()):
        for slot, contribution in last.contributions.items():
            seeds.append((env, slot, contribution, last.contribution_errors.get(slot)))
    newest = max(0, run.view.episode)
    words = f"Each blended seed of round {newest + 1} at the last epoch of its host, with its 95 % interval."
    return _intervals(run, newest, seeds, "Contribution of each seed", words)


def shapley_figure(run: Run) -> str:
    """Shapley values of the newest round."""
    completed = run.of(EpisodeCompleted)
    newest = max((e.episode for e in completed), default=0)
    seeds: list[Seed] = []
    for e in completed:
        if e.episode == newest:
            for slot, (value, error) in e.shapley.items():
                seeds.append((e.env, slot, value, error))
    words = f"Share of each seed of round {newest + 1} in the joint gain of its host's seeds, with its 95 % interval."
    return _intervals(run, newest, seeds, "Shapley values", words)


def _blueprint(run: Run, episode: int, env: int, slot: str) -> str:
    """Returns the blueprint of a seed that is in its host; "" if the log does not have it."""
    life = run.view.lives.get((episode, env))
    if life is None or slot not in life.present:
        return ""
    return life.present[slot].blueprint


def _intervals(run: Run, episode: int, seeds: Sequence[Seed], title: str, words: str) -> str:
    """Returns a chart of seeds with a row for each; "" without seeds."""
    if not seeds:
        return ""
    slots = run.view.slots
    score = run.view.score
    digits = 2 + score.decimals
    rows = []
    cells = []
    for env, slot, points, error in seeds:
        name = f"host {env} {slot} {_blueprint(run, episode, env, slot)}".strip()
        value = score.of(points)
        low = None
        high = None
        if error is not None and math.isfinite(error):
            low = value - NORMAL * score.of(error)
            high = value + NORMAL * score.of(error)
        place = slots.index(slot) if slot in slots else -1
        rows.append(IntervalRow(name, value, low, high, place))
        cells.append([name, number(value, digits, sign=True), number(low, digits), number(high, digits)])
    if len(rows) > MAX_INTERVALS:
        words += f" Only the first {MAX_INTERVALS} of {len(rows)} are drawn."
    chart = interval_chart(title, rows[:MAX_INTERVALS], score.gap_label(score.name), score.gap)
    return figure(title, words, chart, table(["seed", score.gap or "contribution", "from", "to"], cells))
