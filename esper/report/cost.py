"""Where the time went."""

from __future__ import annotations

from collections.abc import Sequence

from esper.report.bars import grouped, stacked_bars
from esper.report.charts import Plot
from esper.report.figure import figure, figures, legend, note, section, table
from esper.report.read import Run
from esper.report.svg import Ids, drawable
from esper.report.text import number
from esper.telemetry.event import RoundCompleted
from esper.telemetry.memory import MEMORY, size

REST = "the rest"
MEANINGS = {
    "act": "the controller chooses actions",
    "stage": "waiting for data",
    "train": "training an epoch of every host",
    "validate": "validating every configuration of every host",
    "govern": "snapshots and rollbacks",
    "decide": "actions, gates, rewards, observations",
    "update": "the agent learns",
    "telemetry": "events and their sinks",
    REST: "hosts left alone, testing, reporting of rounds",
}


def shares(event: RoundCompleted) -> dict[str, float]:
    """Returns the seconds of a round by phase; time outside all phases is the rest."""
    parts = {name: value for name, value in event.phase_seconds.items() if drawable(value) and value > 0}
    rest = event.seconds - sum(parts.values())
    return {**parts, REST: rest} if drawable(rest) and rest > 0 else parts


def time_section(ids: Ids, runs: Sequence[Run]) -> str:
    told = [run for run in runs if run.of(RoundCompleted)]
    if not told:
        return section("time", "Where the time went", note("No round was completed yet."))
    totals = [_sum(run) for run in told]
    together = _add(totals)
    order = sorted(together, key=lambda name: (name == REST, -together[name]))
    names = [(f"fill c{place % 10}", name) for place, name in enumerate(order)]
    charts = [_rounds(ids, run, order, names, len(runs) > 1) for run in told]
    if len(told) > 1:
        bars = [
            (run.name, {k: v / len(run.of(RoundCompleted)) for k, v in total.items()})
            for run, total in zip(told, totals, strict=True)
        ]
        plot = Plot("Seconds per round", _described(bars), "run", "seconds per round", "s")
        words = "Mean over the rounds of each run; the table explains the phases."
        charts = [figure(plot.title, words, stacked_bars(ids, plot, bars, order), legend(names)), *charts]
    heads = ["phase", *(head for run in told for head in (f"{run.name}, s" if len(told) > 1 else "seconds", "share"))]
    sums = [sum(total.values()) or 1.0 for total in totals]
    rows = [
        [_meaning(name)]
        + [cell for total, all_ in zip(totals, sums, strict=True) for cell in _cells(total.get(name), all_)]
        for name in order
    ]
    rates = [
        [
            run.name,
            number(_mean([e.epochs_per_second for e in run.of(RoundCompleted)]), 1),
            number(_mean([e.images_per_second for e in run.of(RoundCompleted)]), 0),
            number(_mean([e.seconds for e in run.of(RoundCompleted)]), 1),
        ]
        for run in told
    ]
    return section(
        "time",
        "Where the time went",
        figures(*charts),
        table(heads, rows, "Seconds by phase, all rounds"),
        table(
            ["run", "epochs per second", "samples per second", "seconds per round"], rates, "Rates, mean over rounds"
        ),
        memory_table(told),
    )


def memory_table(runs: Sequence[Run]) -> str:
    """Memory in use at the end of each run's last round, by kind and place."""
    used = [run.of(RoundCompleted)[-1].memory for run in runs]
    names = list(dict.fromkeys(name for memory in used for name in memory))
    rows = [
        [_memory_meaning(name), *(size(memory[name]) if name in memory else "" for memory in used)] for name in names
    ]
    heads = ["memory", *(run.name for run in runs)] if len(runs) > 1 else ["memory", "in use"]
    return table(heads, rows, "Memory at the end of the last round")


def _memory_meaning(name: str) -> str:
    kind, _, place = name.partition("/")
    told = kind.replace("_", " ") + (f", {place}" if place else "")
    return f"{told}: {MEMORY[kind]}" if kind in MEMORY else told


def _rounds(ids: Ids, run: Run, order: Sequence[str], names: Sequence[tuple[str, str]], named: bool) -> str:
    groups = grouped([shares(event) for event in run.of(RoundCompleted)])
    bars = [(str(a) if a == b else f"{a}-{b}", parts) for a, b, parts in groups]
    title = f"{run.name}: seconds of each round" if named else "Seconds of each round"
    words = "Wall-clock seconds, each counted once; the table explains the phases."
    if groups[0][0] != groups[0][1]:
        words += f" A bar is the mean of {groups[0][1]} rounds."
    plot = Plot(title, _described(bars), "round", "seconds", "s")
    return figure(title, words, stacked_bars(ids, plot, bars, order), legend(names))


def _described(bars: Sequence[tuple[str, dict[str, float]]]) -> str:
    return "; ".join(f"{name}: {number(sum(parts.values()), 1)} s" for name, parts in bars)


def _sum(run: Run) -> dict[str, float]:
    return _add([shares(event) for event in run.of(RoundCompleted)])


def _add(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(p.get(name, 0.0) for p in parts) for name in dict.fromkeys(k for p in parts for k in p)}


def _cells(seconds: float | None, all_seconds: float) -> list[str]:
    return ["0.0", "0.0%"] if seconds is None else [f"{seconds:,.1f}", f"{seconds / all_seconds:.1%}"]


def _mean(values: Sequence[float]) -> float | None:
    found = [value for value in values if drawable(value)]
    return sum(found) / len(found) if found else None


def _meaning(name: str) -> str:
    return f"{name}: {MEANINGS[name]}" if name in MEANINGS else name
