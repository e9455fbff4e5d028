"""Where the time went."""

from __future__ import annotations

from collections.abc import Sequence

from esper.report.charts import grouped, stacked_bars, total
from esper.report.curves import mean
from esper.report.html import figure, figures, note, section, table
from esper.report.read import Run
from esper.telemetry.event import RanksWaited, RoundCompleted
from esper.telemetry.memory import MEMORY, size
from esper.telemetry.run_view import REST, phase_seconds
from esper.telemetry.span import PHASES
from esper.telemetry.text import number

MEANINGS = {**PHASES, REST: "hosts left alone, testing, reporting of rounds; the training of a loop outside Esper"}
RATES = {
    "epochs per second": ("epochs_per_second", 1),
    "samples per second": ("images_per_second", 0),
    "seconds per round": ("seconds", 1),
}
"""Field of RoundCompleted and decimals of each rate."""


def time_section(runs: Sequence[Run]) -> str:
    played = [run for run in runs if run.of(RoundCompleted)]
    if not played:
        return section("time", "Where the time went", note("No round was completed yet."))
    totals = [total(_phases(run)) for run in played]
    all_runs = total(totals)
    order = sorted(all_runs, key=lambda name: (name == REST, -all_runs[name]))
    charts = [_rounds(run, order, len(runs) > 1) for run in played]
    if len(played) > 1:
        bars = [(run.name, grouped(_phases(run), 1)[0][2]) for run in played]
        title, words = "Seconds per round", "Mean over the rounds of each run; the table explains the phases."
        charts.insert(0, figure(title, words, stacked_bars(title, bars, order, "run", "seconds per round")))
    heads = [head for run in played for head in (f"{run.name}, s" if len(played) > 1 else "seconds", "share")]
    rows = [
        [
            f"{name}: {MEANINGS[name]}" if name in MEANINGS else name,
            *(cell for seconds in totals for cell in _cells(seconds, name)),
        ]
        for name in order
    ]
    rates = [
        [run.name, *(number(mean(getattr(e, field) for e in run.of(RoundCompleted)), n) for field, n in RATES.values())]
        for run in played
    ]
    return section(
        "time",
        "Where the time went",
        figures(*charts),
        table(["phase", *heads], rows, "Seconds by phase, all rounds"),
        table(["run", *RATES], rates, "Rates, mean over rounds"),
        memory_table(played),
        *waiting_tables(played),
    )


def _phases(run: Run) -> list[dict[str, float]]:
    return [phase_seconds(event) for event in run.of(RoundCompleted)]


def _cells(total: dict[str, float], name: str) -> list[str]:
    seconds = total.get(name, 0.0)
    return [f"{seconds:,.1f}", f"{seconds / (sum(total.values()) or 1.0):.1%}"]


def _rounds(run: Run, order: Sequence[str], named: bool) -> str:
    groups = grouped(_phases(run))
    bars = [(str(first) if first == last else f"{first}-{last}", parts) for first, last, parts in groups]
    title = f"{run.name}: seconds of each round" if named else "Seconds of each round"
    words = "Wall-clock seconds, each counted once; the table explains the phases."
    if groups[0][0] != groups[0][1]:
        words += f" A bar is the mean of {groups[0][1]} rounds."
    return figure(title, words, stacked_bars(title, bars, order, "round", "seconds"))


def memory_table(runs: Sequence[Run]) -> str:
    """Memory in use at the end of each run's last round, by use and place."""
    used = [run.of(RoundCompleted)[-1].memory for run in runs]
    names = list(dict.fromkeys(name for memory in used for name in memory))
    rows = [[_meaning(name), *(size(memory[name]) if name in memory else "" for memory in used)] for name in names]
    heads = ["memory", *(run.name for run in runs)] if len(runs) > 1 else ["memory", "in use"]
    return table(heads, rows, "Memory at the end of the last round")


def waiting_tables(runs: Sequence[Run]) -> list[str]:
    """The time that the ranks of a run only waited for the slowest, for each run that has several."""
    tables = []
    for run in runs:
        if laps := run.of(RanksWaited):
            seconds = sum(lap.seconds for lap in laps) or 1.0
            waited = [sum(each) for each in zip(*(lap.waited for lap in laps), strict=True)]
            rows = [[str(rank), f"{own:,.1f}", f"{own / seconds:.1%}"] for rank, own in enumerate(waited)]
            tables.append(table(["rank", "seconds", "share"], rows, f"{run.name}: waiting for other ranks, all rounds"))
    return tables


def _meaning(name: str) -> str:
    use, _, place = name.partition("/")
    label = use.replace("_", " ") + (f", {place}" if place else "")
    return f"{label}: {MEMORY[use]}" if use in MEMORY else label
