"""Overview: what a run was, its result, and its configuration."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from esper.show.charts import IntervalRow, interval_chart
from esper.show.console import incident
from esper.show.curves import label, score_of
from esper.show.html import escape, figure, figures, heading, note, section, table
from esper.show.life import life_figure
from esper.show.read import Run, Runs
from esper.telemetry import event as events
from esper.telemetry.score import ACCURACY
from esper.telemetry.text import number, trained_once


def summary_section(runs: Runs) -> str:
    """One column per run, problems of its folder, and the comparison with its baselines."""
    heads = [""]
    rows: dict[str, list[str]] = {}
    parts = []
    for run in runs:
        heads.append(run.name)
        for name, fact in _facts(run).items():
            rows.setdefault(name, [name]).append(fact)
        parts.append(_problems(run, len(runs) > 1))
    facts = table(heads, rows.values(), style="facts")
    parts.append(figures(f"<div>{facts}</div>", verdicts_figure(runs)))
    parts.append(verdicts_table(runs))
    if len(runs) == 1:
        parts.append(figures(life_figure(runs[0].view)))
    return section("summary", "Summary", *parts)


def _problems(run: Run, named: bool) -> str:
    problems = run.all_problems()
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem, 500)}</li>" for problem in problems)
    title = "Not everything could be read"
    if named:
        title = f"{run.name}: not everything could be read"
    return f"<div class=problems><strong>{escape(title)}</strong><ul>{items}</ul></div>"


def _facts(run: Run) -> dict[str, str]:
    started = run.last(events.RunStarted)
    completed = run.last(events.RunCompleted)
    last = run.last(events.RoundCompleted)
    baseline = run.last(events.BaselineMeasured)
    unknown = "not known"
    facts = {
        "state": run.state_words(),
        **run.about,
        "hosts per round": unknown,
        "epochs per host": unknown,
        "parameters of the host": unknown,
        "FLOPs of the host, a sample": unknown,
    }
    n_envs = 1
    if started:
        n_envs = started.n_envs
        facts["hosts per round"] = str(n_envs)
        facts["epochs per host"] = str(started.episode_length)
        facts["parameters of the host"] = f"{started.host_parameters:,}"
        facts["FLOPs of the host, a sample"] = f"{started.host_flops:,.0f}"
    unfinished = "not compared yet"
    parameters = unfinished
    flops = unfinished
    kept = unfinished
    if completed and completed.comparisons:
        parameters = number(completed.parameters, 0)
        kept = number(completed.fossils, 1)
    grown = [e.host_flops + e.fossil_flops for e in run.of(events.EpisodeCompleted)[-n_envs:]]
    if grown:
        flops = number(sum(grown) / len(grown), 0)
    committed = last.committed_accuracy if last else None
    alone = None
    if baseline and baseline.accuracy:
        alone = baseline.accuracy[-1]
    score = run.view.score
    return facts | {
        "parameters, grown": parameters,
        "FLOPs, grown, a sample": flops,
        "seeds kept per host": kept,
        "last round, committed networks, validation": score.value(committed),
        "baseline at the last epoch, validation": score.value(alone),
        "rollbacks": f"{len(run.of(events.GovernorRollback)):,}",
        "seconds": number(completed.seconds, 0) if completed else "not finished",
    }


def _compared(runs: Runs) -> Iterator[tuple[str, int, events.RunCompleted, events.Comparison]]:
    """Yields every comparison of the runs, with its name in the report, and the place and the end of its run."""
    for place, run in enumerate(runs):
        completed = run.last(events.RunCompleted)
        if completed is None:
            continue
        for comparison in completed.comparisons:
            yield label(runs, run, comparison.reference), place, completed, comparison


def verdicts_figure(runs: Runs) -> str:
    """Each paired comparison with its interval."""
    score = score_of(runs)
    rows = []
    for name, place, _, c in _compared(runs):
        value, low, high = map(score.of, (c.difference, c.low, c.high))
        rows.append(IntervalRow(name, value, low, high, place))
    if not rows:
        return ""
    title = "Difference to each baseline"
    words = (
        f"Test {score.name} of committed networks minus that of the same hosts under the baseline, with 95 % intervals."
    )
    axis = f"difference of test {score.name}"
    if score == ACCURACY:
        axis = "difference of test accuracies"
    return figure(title, words, interval_chart(title, rows, score.gap_label(axis), score.gap))


def verdicts_table(runs: Runs) -> str:
    """Each paired comparison in numbers, with its verdict."""
    score = score_of(runs)
    rows = []
    for name, _, completed, c in _compared(runs):
        verdict = c.verdict
        if score != ACCURACY:
            verdict = verdict.partition(" (")[0]  # the numbers in brackets are percentage points
        row = [
            name,
            score.value(c.accuracy, unit=False),
            score.value(c.reference_accuracy, unit=False),
            score.difference(c.difference, unit=False),
            f"{score.difference(c.low, unit=False)} to {score.difference(c.high, unit=False)}",
            number(c.p_value, 4),
            str(completed.pairs),
            verdict,
        ]
        rows.append(row)
    heads = [
        "against",
        score.label("grown"),
        score.label("other"),
        score.gap_label("difference"),
        score.gap_label("95 % interval"),
        "p (Holm)",
        "pairs",
        "verdict",
    ]
    content = table(heads, rows) or note("Nothing was compared yet.")
    agents = dict.fromkeys(completed.controller for _, _, completed, _ in _compared(runs))
    return content + "".join(map(note, trained_once(list(agents))))


def events_section(runs: Runs) -> str:
    """Actions, gates, and incidents."""
    parts = [_events(run, len(runs) > 1) for run in runs]
    return section("events", "Actions and events", *parts)


def _events(run: Run, named: bool) -> str:
    actions = _tally((action.op, action.accepted) for action in run.of(events.ActionTaken))
    gates = _tally((gate.gate, gate.passed) for gate in run.of(events.GateEvaluated))
    incidents: list[tuple[str, str, str]] = []
    for kind in (events.GovernorRollback, events.SeedCut):
        incidents += map(incident, run.of(kind))
    for resumed in run.of(events.RunResumed):
        place = f"after round {resumed.round}"
        if resumed.epochs:
            place += f", {resumed.epochs} epochs into the next round"
        reason = "; ".join(resumed.warnings) or "the run had stopped there, or before the next checkpoint"
        incidents.append((place, "resumed", reason))
    warnings = []
    for times, e in run.view.warnings():
        warnings.append([e.kind.replace("_", " "), f"{times:,}", f"round {e.round}", e.found, e.advice])
    tables = [
        table(["action", "accepted", "refused"], actions, "Actions, without WAIT"),
        table(["gate", "passed", "not passed"], gates, "Gates, when a transition was requested"),
        table(["where", "what", "why"], incidents, "Rollbacks, cut seeds, memory, stops"),
        table(["warning", "times", "last in", "finding", "what to try"], warnings, "Warnings about the agent"),
    ]
    content = "".join(tables) or note("No action, gate or rollback was logged.")
    return heading(run.name, named) + content


def _tally(outcomes: Iterable[tuple[str, bool]]) -> list[list[str]]:
    """Returns a row for each name, with the numbers of its successes and of its failures."""
    counts = Counter(outcomes)
    names = sorted({name for name, _ in counts})
    return [[name, f"{counts[name, True]:,}", f"{counts[name, False]:,}"] for name in names]


def configuration_section(runs: Runs) -> str:
    """All config values; for several runs, the differing ones first."""
    heads = ["value", *(run.name for run in runs)]
    rows = _rows(list(map(_config, runs)))
    parts = []
    if len(runs) > 1:
        different = [row for row in rows if len(set(row[1:])) > 1]
        differences = table(heads, different, "Differences between the runs", "facts")
        parts.append(differences or note("The configurations are the same."))
    config = table(heads, rows, style="facts") or note("No config.toml could be read.")
    parts.append(f"<details><summary>The whole configuration</summary>{config}</details>")
    rows = _rows([run.environment for run in runs])
    system = table(heads, rows, style="facts") or note("No env.json could be read.")
    parts.append(f"<details><summary>Versions and hardware</summary>{system}</details>")
    return section("configuration", "Configuration", *parts)


def _config(run: Run) -> dict[str, Any]:
    """Returns the config of a run; of a loop outside Esper only what its Grower uses of it."""
    if not run.view.own_loop:
        return run.config
    started = {
        "seed": run.value("run", "seed"),
        "controller": run.value("run", "controller"),
    }
    used = {name: values for name, values in run.config.items() if name in ("env", "reward", "governor")}
    return {"run": started, **used}


def _rows(tables: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Returns a row for each dotted name: the name, and its value in each of the tables."""
    rows: dict[str, list[str]] = {}
    for place, nested in enumerate(tables):
        for name, value in _flat(nested).items():
            row = rows.setdefault(name, [name, *[""] * len(tables)])
            row[place + 1] = value
    return list(rows.values())


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flattens nested tables to dotted names; values are written as JSON, strings as they are."""
    flat: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and value and len(prefix) < 200:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[f"{prefix}{key}"] = text
    return flat
