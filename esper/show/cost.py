"""Where the time went."""

from __future__ import annotations

from collections.abc import Sequence

from esper.show.charts import grouped, stacked_bars, total
from esper.show.curves import mean
from esper.show.html import figure, figures, note, section, table
from esper.show.read import Run, Runs
from esper.show.run_view import REST, phase_seconds
from esper.telemetry.event import RanksWaited, RoundCompleted
from esper.telemetry.memory import MEMORY, size
from esper.telemetry.span import PHASES
from esper.telemetry.text import number

MEANINGS = {**PHASES, REST: "hosts left alone, testing, reporting of rounds; the training of a loop outside Esper"}
RATES = {
    "epochs per second": ("epochs_per_second", 1),
    "samples per second": ("images_per_second", 0),
    "seconds per round": ("seconds", 1),
}
"""Field of RoundCompleted and decimals of each rate."""


def time_section(runs: Runs) -> str:
    played = [run for run in runs if run.of(RoundCompleted)]
    if not played:
        return section("time", "Where the time went", note("No round was completed yet."))
    totals = list(map(total, map(_phases, played)))
    all_runs = total(totals)
    order = sorted(all_runs, key=lambda name: (name == REST, -all_runs[name]))
    charts = []
    if len(played) > 1:
        charts.append(_runs(played, order))
    charts += [_rounds(run, order, len(runs) > 1) for run in played]
    return section(
        "time",
        "Where the time went",
        figures(*charts),
        _phase_table(played, totals, order),
        _rate_table(played),
        memory_table(played),
        *waiting_tables(played),
    )


def _phases(run: Run) -> list[dict[str, float]]:
    return list(map(phase_seconds, run.of(RoundCompleted)))


def _phase_table(runs: Runs, totals: Sequence[dict[str, float]], order: Sequence[str]) -> str:
    heads = ["phase"]
    for run in runs:
        heads.append(f"{run.name}, s" if len(runs) > 1 else "seconds")
        heads.append("share")
    rows = []
    for name in order:
        row = [name]
        if name in MEANINGS:
            row = [f"{name}: {MEANINGS[name]}"]
        for parts in totals:
            seconds = parts.get(name, 0.0)
            whole = sum(parts.values()) or 1.0
            row.append(f"{seconds:,.1f}")
            row.append(f"{seconds / whole:.1%}")
        rows.append(row)
    return table(heads, rows, "Seconds by phase, all rounds")


def _rate_table(runs: Runs) -> str:
    rows = []
    for run in runs:
        row = [run.name]
        for field, decimals in RATES.values():
            rate = mean(getattr(event, field) for event in run.of(RoundCompleted))
            row.append(number(rate, decimals))
        rows.append(row)
    return table(["run", *RATES], rows, "Rates, mean over rounds")


def _runs(runs: Runs, order: Sequence[str]) -> str:
    bars = []
    for run in runs:
        _, _, means = grouped(_phases(run), 1)[0]
        bars.append((run.name, means))
    title = "Seconds per round"
    words = "Mean over the rounds of each run; the table explains the phases."
    return figure(title, words, stacked_bars(title, bars, order, "run", "seconds per round"))


def _rounds(run: Run, order: Sequence[str], named: bool) -> str:
    title = "Seconds of each round"
    if named:
        title = f"{run.name}: seconds of each round"
    words = "Wall-clock seconds, each counted once; the table explains the phases."
    groups = grouped(_phases(run))
    _, size, _ = groups[0]
    if size > 1:
        words += f" A bar is the mean of {size} rounds."
    bars = []
    for first, last, parts in groups:
        rounds = str(first) if first == last else f"{first}-{last}"
        bars.append((rounds, parts))
    return figure(title, words, stacked_bars(title, bars, order, "round", "seconds"))


def memory_table(runs: Runs) -> str:
    """Memory in use at the end of each run's last round, by use and place."""
    heads = ["memory"]
    used = []
    names: dict[str, int] = {}
    for run in runs:
        memory = run.of(RoundCompleted)[-1].memory
        heads.append(run.name if len(runs) > 1 else "in use")
        used.append(memory)
        names |= memory
    rows = []
    for name in names:
        row = [_meaning(name)]
        for memory in used:
            text = ""
            if name in memory:
                text = size(memory[name])
            row.append(text)
        rows.append(row)
    return table(heads, rows, "Memory at the end of the last round")


def waiting_tables(runs: Runs) -> list[str]:
    """The time that the ranks of a run only waited for the slowest, for each run that has several."""
    tables = []
    for run in runs:
        laps = run.of(RanksWaited)
        if not laps:
            continue
        whole = sum(lap.seconds for lap in laps) or 1.0
        by_rank = zip(*(lap.waited for lap in laps), strict=True)
        rows = []
        for rank, waited in enumerate(map(sum, by_rank)):
            rows.append([str(rank), f"{waited:,.1f}", f"{waited / whole:.1%}"])
        tables.append(table(["rank", "seconds", "share"], rows, f"{run.name}: waiting for other ranks, all rounds"))
    return tables


def _meaning(name: str) -> str:
    use, _, place = name.partition("/")
    label = use.replace("_", " ")
    if place:
        label += f", {place}"
    if use in MEMORY:
        label += f": {MEMORY[use]}"
    return label
