"""Overview: what a run was, its result, and its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from esper.report.charts import IntervalRow, drawable, interval_chart
from esper.report.curves import label, score_of
from esper.report.html import escape, figure, figures, heading, note, section, table
from esper.report.life import life_figure
from esper.report.read import Run
from esper.telemetry import event as events
from esper.telemetry.score import ACCURACY
from esper.telemetry.status import incident
from esper.telemetry.text import number, trained_once


def summary_section(runs: Sequence[Run]) -> str:
    """One column per run, problems of its folder, and the comparison with its baselines."""
    facts = [_facts(run) for run in runs]
    rows = [[name, *(fact[name] for fact in facts)] for name in facts[0]]
    return section(
        "summary",
        "Summary",
        *(_problems(run, len(runs) > 1) for run in runs),
        figures(
            "<div>" + table(["", *(run.name for run in runs)], rows, style="facts") + "</div>",
            verdicts_figure(runs),
        ),
        verdicts_table(runs),
        figures(life_figure(runs[0])) if len(runs) == 1 else "",
    )


def _problems(run: Run, named: bool) -> str:
    problems = run.all_problems()
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem, 500)}</li>" for problem in problems)
    title = f"{run.name}: not everything could be read" if named else "Not everything could be read"
    return f"<div class=problems><strong>{escape(title)}</strong><ul>{items}</ul></div>"


def _facts(run: Run) -> dict[str, str]:
    started, completed = run.last(events.RunStarted), run.last(events.RunCompleted)
    last, baseline = run.last(events.RoundCompleted), run.last(events.BaselineMeasured)
    alone = baseline.accuracy[-1] if baseline and baseline.accuracy else None
    compared = completed if completed and completed.comparisons else None
    ended = run.of(events.EpisodeCompleted)[-(started.n_envs if started else 1) :]
    grown = [episode.host_flops + episode.fossil_flops for episode in ended]
    unknown, unfinished = "not known", "not compared yet"
    return {
        "state": run.state_words(),
        "task": started.task if started else str(run.value("task", "name") or unknown),
        "controller": started.controller if started else str(run.value("run", "controller") or unknown),
        "seed": str(started.seed if started else run.value("run", "seed")),
        "hosts per round": str(started.n_envs) if started else unknown,
        "epochs per host": str(started.episode_length) if started else unknown,
        "parameters of the host": f"{started.host_parameters:,}" if started else unknown,
        "FLOPs of the host, a sample": f"{started.host_flops:,.0f}" if started else unknown,
        "parameters, grown": number(compared.parameters, 0) if compared else unfinished,
        "FLOPs, grown, a sample": number(sum(grown) / len(grown), 0) if grown else unfinished,
        "seeds kept per host": number(compared.fossils, 1) if compared else unfinished,
        "last round, committed networks, validation": run.view.score.value(last.committed_accuracy if last else None),
        "baseline at the last epoch, validation": run.view.score.value(alone),
        "rollbacks": f"{len(run.of(events.GovernorRollback)):,}",
        "seconds": number(completed.seconds, 0) if completed else "not finished",
    }


def _compared(runs: Sequence[Run]) -> list[tuple[str, int, int, events.Comparison]]:
    """Returns (name, index of the run, pairs, comparison) for every comparison."""
    return [
        (label(runs, run, comparison.reference), place, completed.pairs, comparison)
        for place, run in enumerate(runs)
        if (completed := run.last(events.RunCompleted)) is not None
        for comparison in completed.comparisons
    ]


def verdicts_figure(runs: Sequence[Run]) -> str:
    """Each paired comparison with its interval."""
    rows, score = [], score_of(runs)
    for name, place, _, c in _compared(runs):
        low, high = (score.of(c.low), score.of(c.high)) if drawable(c.low) and drawable(c.high) else (None, None)
        rows.append(IntervalRow(name, score.of(c.difference), low, high, place))
    if not rows:
        return ""
    title = "Difference to each baseline"
    words = (
        f"Test {score.name} of committed networks minus that of the same hosts under the baseline, with 95 % intervals."
    )
    axis = "difference of test accuracies" if score == ACCURACY else f"difference of test {score.name}"
    return figure(title, words, interval_chart(title, rows, score.gap_label(axis), score.gap))


def verdicts_table(runs: Sequence[Run]) -> str:
    """Each paired comparison in numbers, with its verdict."""
    score = score_of(runs)
    rows = [
        [
            name,
            score.value(c.accuracy, unit=False),
            score.value(c.reference_accuracy, unit=False),
            score.difference(c.difference, unit=False),
            f"{score.difference(c.low, unit=False)} to {score.difference(c.high, unit=False)}",
            number(c.p_value, 4),
            str(pairs),
            c.verdict if score == ACCURACY else c.verdict.partition(" (")[0],  # whose numbers are percentage points
        ]
        for name, _, pairs, c in _compared(runs)
    ]
    heads = [*map(score.label, ("grown", "other")), *map(score.gap_label, ("difference", "95 % interval"))]
    shown = table(["against", *heads, "p (Holm)", "pairs", "verdict"], rows) or note("Nothing was compared yet.")
    agents = [completed.controller for run in runs if (completed := run.last(events.RunCompleted))]
    return shown + "".join(note(sentence) for sentence in trained_once(list(dict.fromkeys(agents))))


def events_section(runs: Sequence[Run]) -> str:
    """Actions, gates, and incidents."""
    return section("events", "Actions and events", *(_events(run, len(runs) > 1) for run in runs))


def _events(run: Run, named: bool) -> str:
    actions = _tally((action.op, action.accepted) for action in run.of(events.ActionTaken))
    gates = _tally((gate.gate, gate.passed) for gate in run.of(events.GateEvaluated))
    halved = run.of(events.MicroBatchHalved)
    incidents = [incident(event) for event in (*run.of(events.GovernorRollback), *run.of(events.SeedCut), *halved)]
    incidents += [
        (
            f"after round {e.round}" + (f", {e.epochs} epochs into the next round" if e.epochs else ""),
            "resumed",
            "; ".join(e.warnings) or "the run had stopped there, or before the next checkpoint",
        )
        for e in run.of(events.RunResumed)
    ]
    warnings = [
        [e.kind.replace("_", " "), f"{times:,}", f"round {e.round}", e.found, e.advice]
        for times, e in run.view.warnings()
    ]
    tables = [
        table(["action", "accepted", "refused"], actions, "Actions, without WAIT"),
        table(["gate", "passed", "not passed"], gates, "Gates, when a transition was requested"),
        table(["where", "what", "why"], incidents, "Rollbacks, cut seeds, memory, stops"),
        table(["warning", "times", "last in", "finding", "what to try"], warnings, "Warnings about the agent"),
    ]
    content = "".join(tables) or note("No action, gate or rollback was logged.")
    return heading(run.name, named) + content


def _tally(outcomes: Iterable[tuple[str, bool]]) -> list[list[str]]:
    """Returns a row for each name: how often it succeeded and how often it did not."""
    counts: dict[str, list[int]] = {}
    for name, success in outcomes:
        counts.setdefault(name, [0, 0])[not success] += 1
    return [[name, f"{good:,}", f"{bad:,}"] for name, (good, bad) in sorted(counts.items())]


def configuration_section(runs: Sequence[Run]) -> str:
    """All config values; for several runs, the differing ones first."""
    heads = ["value", *(run.name for run in runs)]
    rows = _rows([_config(run) for run in runs])
    parts = []
    if len(runs) > 1:
        different = [row for row in rows if len(set(row[1:])) > 1]
        parts.append(
            table(heads, different, "Differences between the runs", "facts") or note("The configurations are the same.")
        )
    config = table(heads, rows, style="facts") or note("No config.toml could be read.")
    parts.append(f"<details><summary>The whole configuration</summary>{config}</details>")
    system = table(heads, _rows([run.environment for run in runs]), style="facts")
    system = system or note("No env.json could be read.")
    parts.append(f"<details><summary>Versions and hardware</summary>{system}</details>")
    return section("configuration", "Configuration", *parts)


def _config(run: Run) -> dict[str, Any]:
    """Returns the config of a run; of a loop outside Esper only what its Grower uses of it."""
    if not run.view.own_loop:
        return run.config
    used = {name: table for name, table in run.config.items() if name in ("env", "reward", "governor")}
    return {"run": {name: run.value("run", name) for name in ("seed", "controller")}, **used}


def _rows(tables: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Returns a row for each dotted name: the name, and its value in each of the tables."""
    flat = [_flat(nested) for nested in tables]
    return [[name, *(values.get(name, "") for values in flat)] for name in dict.fromkeys(n for f in flat for n in f)]


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flattens nested tables to dotted names; values are written as JSON, strings as they are."""
    flat: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and value and len(prefix) < 200:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat
