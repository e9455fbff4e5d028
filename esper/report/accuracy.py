"""Accuracy, or another score, of hosts beside hosts left alone, and its cost in parameters."""

from __future__ import annotations

from collections.abc import Sequence

from esper.report.charts import Line, by_round, line_figure, scatter_chart
from esper.report.curves import by_epoch, label, score_of, shown_epochs
from esper.report.html import figure, figures, note, section, table
from esper.report.read import Run
from esper.telemetry.event import BaselineMeasured, EpisodeCompleted, EpochCompleted, RoundCompleted
from esper.telemetry.score import ScoreUnit

MAX_EPISODES = 400
"""Max hosts of a run in the chart of parameters."""


def accuracy_section(runs: Sequence[Run]) -> str:
    content = figures(epochs_figure(runs), rounds_figure(runs), parameters_figure(runs))
    return section("accuracy", capital(score_of(runs).name), content)


def capital(name: str) -> str:
    """Returns the name of a score as the start of a title; names with capitals of their own stay as they are."""
    return name.capitalize() if name.islower() else name


def epochs_figure(runs: Sequence[Run]) -> str:
    """Validation accuracy by epoch, with the baseline; for a single run also the worst and the best host."""
    lines: list[Line] = []
    rounds, score = [], score_of(runs)
    title = f"{capital(score.name)} by epoch"
    for place, run in enumerate(runs):
        epochs, words = shown_epochs(run)
        rounds.append(label(runs, run, words))
        if epochs:
            lines += _grown(runs, place, epochs, score)
            if len(runs) == 1 and run.learns and all(e.episode for e in epochs):
                earliest = (e for e in run.of(EpochCompleted) if not e.episode)
                first = by_epoch(earliest, lambda e: score.of(e.validation_accuracy))
                lines.append(Line("grown in round 1", first.x, first.mean, 1))
    lines += _baselines(runs, score)
    if not lines:
        return note(f"{title}: no epochs and no baseline were logged.")
    words = f"Validation {score.name}, mean over hosts: {'; '.join(rounds)}."
    if len(runs) == 1:
        words += (
            " Shaded: the middle 80 % of the hosts. Best and worst: the hosts with the highest and the lowest "
            f"{score.name} at each epoch."
            if any(line.name == "best host" for line in lines)
            else ""
        ) + " Committed: host and fossils only."
    return line_figure(title, words, lines, "epochs done", score.label(f"validation {score.name}"))


def _grown(runs: Sequence[Run], place: int, epochs: Sequence[EpochCompleted], score: ScoreUnit) -> list[Line]:
    curve = by_epoch(epochs, lambda e: score.of(e.validation_accuracy))
    if len(runs) > 1:
        return [Line(label(runs, runs[place], "grown"), curve.x, curve.mean, place)]
    committed = by_epoch(epochs, lambda e: score.of(e.committed_accuracy))
    extremes = [Line("best host", curve.x, curve.best, 5), Line("worst host", curve.x, curve.worst, 4)]
    return [
        Line("grown", curve.x, curve.mean, 0, curve.low, curve.high),
        *(extremes if curve.best != curve.worst else []),
        Line("committed", committed.x, committed.mean, 2),
    ]


def _baselines(runs: Sequence[Run], score: ScoreUnit) -> list[Line]:
    """Returns the baseline lines: a single one for all runs that share a baseline, as with the same task and seed."""
    owners: dict[tuple[float, ...], list[int]] = {}
    for place, run in enumerate(runs):
        if baseline := run.last(BaselineMeasured):
            owners.setdefault(baseline.accuracy, []).append(place)
    lines = []
    for accuracy, places in owners.items():
        names = "" if len(places) == len(runs) else f"{', '.join(runs[place].name for place in places)}: "
        shade = places[0] if len(runs) > 1 and len(places) == 1 else -1
        curve = [score.of(value) for value in accuracy]
        lines.append(Line(f"{names}left alone (baseline)", range(len(curve)), curve, shade, reference=True))
    return lines


def rounds_figure(runs: Sequence[Run]) -> str:
    """Accuracy, or another score, at the end of each round."""
    lines: list[Line] = []
    score = score_of(runs)
    title, unit = f"{capital(score.name)} by round", score.points
    tested: list[Line] = []
    for place, run in enumerate(runs):
        rounds, baseline = run.of(RoundCompleted), place if len(runs) > 1 else -1
        lines += by_round(label(runs, run, "grown, committed"), rounds, "committed_accuracy", place, unit=unit)
        if run.view.alone:
            left_alone = label(runs, run, run.view.alone)
            lines += by_round(left_alone, rounds, "baseline_accuracy", baseline, reference=True, unit=unit)
        if len(runs) == 1:
            tested += by_round("grown, test", rounds, "test_accuracy", 2, unit=unit)
            tested += by_round("same hosts alone, test", rounds, "alone_test_accuracy", 1, reference=True, unit=unit)
    if not lines:
        return note(f"{title}: no round was completed yet.")
    words = f"{capital(score.name)} of the committed networks at the end of a round, on validation images" + (
        "; and on test images, beside the same hosts left alone."
        if tested
        else ", beside the baseline."
        if any(line.reference for line in lines)
        else "."
    )
    return line_figure(title, words, [*lines, *tested], "round", score.label(score.name))


def parameters_figure(runs: Sequence[Run]) -> str:
    """Number of parameters and accuracy, or other score, of each host that completed its episode."""
    groups, rows, score = [], [], score_of(runs)
    title = f"{capital(score.name)} against parameters"
    for place, run in enumerate(runs):
        episodes = run.of(EpisodeCompleted)[-MAX_EPISODES:]
        if not episodes:
            continue
        sizes = [e.host_parameters + e.fossil_parameters for e in episodes]
        grown = [score.of(e.committed_accuracy) for e in episodes]
        groups.append(Line(label(runs, run, "grown host"), sizes, grown, place))
        last = episodes[-1]
        if run.view.alone:
            alone = ([last.host_parameters], [score.of(last.baseline_accuracy)], place if len(runs) > 1 else -1)
            groups.append(Line(label(runs, run, "left alone (baseline)"), *alone, reference=True))
        rows += [
            [
                label(runs, run, f"round {e.episode + 1}, host {e.env}"),
                f"{e.host_parameters + e.fossil_parameters:,}",
                f"{e.host_flops + e.fossil_flops:,.0f}",
                score.value(e.committed_accuracy, unit=False),
                score.value(e.baseline_accuracy if run.view.alone else None, unit=False),
                ", ".join(f"{slot} {blueprint}" for slot, blueprint in e.fossils.items()) or "nothing",
            ]
            for e in reversed(episodes)
        ]
    if not groups:
        return note(f"{title}: no host has completed its episode yet.")
    words = (
        "Each point is a committed network (host and fossils) at the end of its episode, on validation images. FLOPs "
        "are the floating-point operations of a forward pass, a sample."
    )
    if any(len(run.of(EpisodeCompleted)) > MAX_EPISODES for run in runs):
        words += f" Only the newest {MAX_EPISODES} hosts of each run are drawn."
    axis = score.label(f"validation {score.name}")
    chart = scatter_chart(title, groups, "parameters of the committed network", axis)
    heads = ["host", "parameters", "FLOPs", score.label("committed"), score.label("baseline"), "kept"]
    return figure(title, words, chart, table(heads, rows))
