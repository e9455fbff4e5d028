"""Overview: what a run was, its result, and its configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from esper.report.bars import Interval, interval_chart
from esper.report.charts import Plot
from esper.report.figure import figure, figures, note, section, table
from esper.report.read import Run
from esper.report.svg import Ids, drawable
from esper.report.text import escape, number
from esper.telemetry.event import (
    ActionTaken,
    BaselineMeasured,
    Comparison,
    GateEvaluated,
    GovernorRollback,
    MicroBatchHalved,
    RoundCompleted,
    RunCompleted,
    RunResumed,
    SeedCut,
)


def summary_section(ids: Ids, runs: Sequence[Run]) -> str:
    """One column per run, problems of its folder, and the comparison with its baselines."""
    facts = [_facts(run) for run in runs]
    rows = [[name, *(fact[name] for fact in facts)] for name in facts[0]]
    return section(
        "summary",
        "Summary",
        *(_problems(run, len(runs) > 1) for run in runs),
        figures(
            "<div>" + table(["", *(run.name for run in runs)], rows, style="facts") + "</div>",
            verdicts_figure(ids, runs),
        ),
        verdicts_table(runs),
    )


def _problems(run: Run, named: bool) -> str:
    found = run.all_problems()
    if not found:
        return ""
    items = "".join(f"<li>{escape(problem, 500)}</li>" for problem in found)
    title = f"{run.name}: not everything could be read" if named else "Not everything could be read"
    return f"<div class=problems><strong>{escape(title)}</strong><ul>{items}</ul></div>"


def _facts(run: Run) -> dict[str, str]:
    started, completed, last = run.started, run.last(RunCompleted), run.last(RoundCompleted)
    baseline = run.last(BaselineMeasured)
    alone = baseline.accuracy[-1] if baseline and baseline.accuracy else None
    return {
        "state": run.state_words(),
        "task": started.task if started else str(run.value("task", "name") or "not known"),
        "controller": started.controller if started else str(run.value("run", "controller") or "not known"),
        "seed": str(started.seed if started else run.value("run", "seed")),
        "hosts per round": str(started.n_envs) if started else "not known",
        "epochs per host": str(started.episode_length) if started else "not known",
        "parameters of the host": f"{started.host_parameters:,}" if started else "not known",
        "parameters, grown": number(completed.parameters, 0) if completed else "not compared yet",
        "seeds kept per host": number(completed.fossils, 1) if completed else "not compared yet",
        "last round, committed networks, validation": number(
            last.committed_accuracy if last else None, 2, "%" if last else ""
        ),
        "baseline at the last epoch, validation": number(alone, 2, "%" if alone is not None else ""),
        "rollbacks": f"{len(run.of(GovernorRollback)):,}",
        "seconds": number(completed.seconds, 0) if completed else "not finished",
    }


def _compared(runs: Sequence[Run]) -> list[tuple[str, int, int, Comparison]]:
    """Returns (name, index of the run, pairs, comparison) for every comparison."""
    found = []
    for place, run in enumerate(runs):
        completed = run.last(RunCompleted)
        for c in completed.comparisons if completed else ():
            name = f"{run.name}: {c.reference}" if len(runs) > 1 else c.reference
            found.append((name, place, completed.pairs if completed else 0, c))
    return found


def verdicts_figure(ids: Ids, runs: Sequence[Run]) -> str:
    """Each paired comparison with its interval."""
    intervals = []
    for name, place, _, c in _compared(runs):
        low, high = (c.low, c.high) if drawable(c.low) and drawable(c.high) else (None, None)
        intervals.append(Interval(name, c.difference, low, high, place % 8))
    if not intervals:
        return ""
    described = "; ".join(interval.words("pp") for interval in intervals)
    plot = Plot("Difference to each baseline", described, "difference of test accuracies, pp", "", "pp")
    words = "Test accuracy of committed networks minus that of the same hosts under the baseline, with 95 % intervals."
    return figure(plot.title, words, interval_chart(ids, plot, intervals))


def verdicts_table(runs: Sequence[Run]) -> str:
    """Each paired comparison in numbers, with its verdict."""
    rows = [
        [
            name,
            number(c.accuracy),
            number(c.reference_accuracy),
            number(c.difference, sign=True),
            f"{number(c.low, sign=True)} to {number(c.high, sign=True)}",
            number(c.p_value, 4),
            str(pairs),
            c.verdict,
        ]
        for name, _, pairs, c in _compared(runs)
    ]
    heads = ["against", "grown, %", "other, %", "difference, pp", "95 % interval, pp", "p (Holm)", "pairs", "verdict"]
    return table(heads, rows) or note("Nothing was compared yet.")


def happenings_section(runs: Sequence[Run]) -> str:
    """Actions, gates, and incidents."""
    return section("events", "Actions and events", *(_happenings(run, len(runs) > 1) for run in runs))


def _happenings(run: Run, named: bool) -> str:
    parts = [f"<h3>{escape(run.name)}</h3>"] if named else []
    taken: dict[str, list[int]] = {}
    for action in run.of(ActionTaken):
        counts = taken.setdefault(action.op, [0, 0])
        counts[0 if action.accepted else 1] += 1
    rows = [[op, f"{a:,}", f"{r:,}"] for op, (a, r) in sorted(taken.items())]
    parts.append(table(["action", "accepted", "refused"], rows, "Actions, without WAIT"))
    asked: dict[str, list[int]] = {}
    for gate in run.of(GateEvaluated):
        counts = asked.setdefault(gate.gate, [0, 0])
        counts[0 if gate.passed else 1] += 1
    rows = [[name, f"{a:,}", f"{r:,}"] for name, (a, r) in sorted(asked.items())]
    parts.append(table(["gate", "passed", "not passed"], rows, "Gates, when a transition was requested"))
    bad = [
        [
            f"round {e.episode + 1}, host {e.env}, epoch {e.epoch}",
            "rollback",
            f"{e.reason}: {number(e.value, 4)}, limit {number(e.threshold, 4)}; back to epoch {e.restored_epoch}",
        ]
        for e in run.of(GovernorRollback)
    ]
    bad += [
        [
            f"round {e.episode + 1}, host {e.env}, epoch {e.epoch}",
            "seed cut",
            f"{e.blueprint} in {e.slot} became non-finite",
        ]
        for e in run.of(SeedCut)
    ]
    bad += [
        [f"host {e.env}, epoch {e.epoch}", "out of memory", f"{e.reason}; {e.micro_batches} micro-batches from then on"]
        for e in run.of(MicroBatchHalved)
    ]
    bad += [
        [
            f"after round {e.round}" + (f", {e.epochs} epochs into the next round" if e.epochs else ""),
            "resumed",
            "; ".join(e.warnings) or "the run had stopped there, or before the next checkpoint",
        ]
        for e in run.of(RunResumed)
    ]
    parts.append(table(["where", "what", "why"], bad, "Rollbacks, cut seeds, memory, stops"))
    wrong = [
        [e.kind.replace("_", " "), f"{times:,}", f"round {e.round}", e.found, e.advice] for times, e in run.warnings()
    ]
    parts.append(table(["warning", "times", "last in", "finding", "what to try"], wrong, "Warnings about the agent"))
    if not any(parts[1 if named else 0 :]):
        parts.append(note("No action, gate or rollback was logged."))
    return "".join(parts)


def configuration_section(runs: Sequence[Run]) -> str:
    """All config values; for several runs, the differing ones first."""
    values = [_flat(run.config) for run in runs]
    names = list(dict.fromkeys(name for found in values for name in found))
    heads = ["value", *(run.name for run in runs)]
    rows = [[name, *(found.get(name, "") for found in values)] for name in names]
    parts = []
    if len(runs) > 1:
        different = [row for row in rows if len(set(row[1:])) > 1]
        parts.append(
            table(heads, different, "Differences between the runs", "facts") or note("The configurations are the same.")
        )
    everything = table(heads, rows, style="facts") or note("No config.toml could be read.")
    parts.append(f"<details><summary>The whole configuration</summary>{everything}</details>")
    facts = [_flat(run.environment) for run in runs]
    names = list(dict.fromkeys(name for found in facts for name in found))
    machine = table(heads, [[name, *(found.get(name, "") for found in facts)] for name in names], style="facts")
    machine = machine or note("No env.json could be read.")
    parts.append(f"<details><summary>Versions and hardware</summary>{machine}</details>")
    return section("configuration", "Configuration", *parts)


def _flat(table_: dict[str, Any], place: str = "") -> dict[str, str]:
    """Flattens nested tables to dotted names; values are written as JSON, strings as they are."""
    found: dict[str, str] = {}
    for key, value in table_.items():
        if isinstance(value, dict) and value and len(place) < 200:
            found.update(_flat(value, f"{place}{key}."))
        else:
            found[f"{place}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found
