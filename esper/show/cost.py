"""Where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from esper.show.charts import Line, line_figure
from esper.show.curves import label, mean
from esper.show.html import figures, note, section, table
from esper.show.read import Run, Runs
from esper.show.view import REST, phase_seconds
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
    totals = []
    everything: Counter[str] = Counter()
    for run in played:
        seconds: Counter[str] = Counter()
        for event in run.of(RoundCompleted):
            seconds.update(phase_seconds(event))
        totals.append(seconds)
        everything += seconds
    order = sorted(everything, key=lambda name: (name == REST, -everything[name]))
    return section(
        "time",
        "Where the time went",
        figures(*(_rounds(runs, run, order) for run in played)),
        _phase_table(played, totals, order),
        _rate_table(played),
        memory_table(played),
        *waiting_tables(played),
    )


def _rounds(runs: Runs, run: Run, order: Sequence[str]) -> str:
    """The seconds of each phase, by round."""
    lines = []
    for place, name in enumerate(order):
        rounds = []
        seconds = []
        for event in run.of(RoundCompleted):
            rounds.append(event.round)
            seconds.append(phase_seconds(event).get(name, 0.0))
        lines.append(Line(name, rounds, seconds, place))
    words = "Wall-clock seconds, each counted once; the table explains the phases."
    return line_figure(label(runs, run, "Seconds of each round"), words, lines, "round", "seconds", include=[0.0])


def _phase_table(runs: Runs, totals: Sequence[Counter[str]], order: Sequence[str]) -> str:
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
            whole = parts.total() or 1.0
            row.append(f"{parts[name]:,.1f}")
            row.append(f"{parts[name] / whole:.1%}")
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
