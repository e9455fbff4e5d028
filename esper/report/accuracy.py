"""Accuracy of hosts beside hosts left alone, and its cost in parameters."""

from __future__ import annotations

from collections.abc import Sequence

from esper.report.charts import Line, by_round, line_figure, scatter_chart
from esper.report.curves import by_epoch, label, shown_epochs
from esper.report.html import figure, figures, note, section, table
from esper.report.read import Run
from esper.telemetry.event import BaselineMeasured, EpisodeCompleted, EpochCompleted, RoundCompleted
from esper.telemetry.text import number

MAX_EPISODES = 400
"""Max hosts of a run in the chart of parameters."""


def accuracy_section(runs: Sequence[Run]) -> str:
    return section("accuracy", "Accuracy", figures(epochs_figure(runs), rounds_figure(runs), parameters_figure(runs)))


def epochs_figure(runs: Sequence[Run]) -> str:
    """Validation accuracy by epoch, with the baseline; for a single run also the worst and the best host."""
    lines: list[Line] = []
    rounds = []
    for place, run in enumerate(runs):
        epochs, words = shown_epochs(run)
        rounds.append(label(runs, run, words))
        if epochs:
            lines += _grown(runs, place, epochs)
            if len(runs) == 1 and run.learns and all(e.episode for e in epochs):
                first = by_epoch((e for e in run.of(EpochCompleted) if not e.episode), lambda e: e.validation_accuracy)
                lines.append(Line("grown in round 1", first.x, first.mean, 1))
    lines += _baselines(runs)
    if not lines:
        return note("Accuracy by epoch: no epochs and no baseline were logged.")
    words = f"Validation accuracy, mean over hosts: {'; '.join(rounds)}."
    if len(runs) == 1:
        words += (
            " Shaded: the middle 80 % of the hosts. Best and worst: the hosts with the highest and the lowest accuracy "
            "at each epoch. Committed: host and fossils only."
        )
    return line_figure("Accuracy by epoch", words, lines, "epochs done", "validation accuracy, %")


def _grown(runs: Sequence[Run], place: int, epochs: Sequence[EpochCompleted]) -> list[Line]:
    curve = by_epoch(epochs, lambda e: e.validation_accuracy)
    if len(runs) > 1:
        return [Line(label(runs, runs[place], "grown"), curve.x, curve.mean, place)]
    committed = by_epoch(epochs, lambda e: e.committed_accuracy)
    return [
        Line("grown", curve.x, curve.mean, 0, curve.low, curve.high),
        Line("best host", curve.x, curve.best, 5),
        Line("worst host", curve.x, curve.worst, 4),
        Line("committed", committed.x, committed.mean, 2),
    ]


def _baselines(runs: Sequence[Run]) -> list[Line]:
    """Returns the baseline lines: a single one for all runs that share a baseline, as with the same task and seed."""
    owners: dict[tuple[float, ...], list[int]] = {}
    for place, run in enumerate(runs):
        if baseline := run.last(BaselineMeasured):
            owners.setdefault(baseline.accuracy, []).append(place)
    lines = []
    for accuracy, places in owners.items():
        names = "" if len(places) == len(runs) else f"{', '.join(runs[place].name for place in places)}: "
        shade = places[0] if len(runs) > 1 and len(places) == 1 else -1
        lines.append(Line(f"{names}left alone (baseline)", range(len(accuracy)), accuracy, shade, reference=True))
    return lines


def rounds_figure(runs: Sequence[Run]) -> str:
    """Accuracy at the end of each round."""
    lines: list[Line] = []
    tested: list[Line] = []
    for place, run in enumerate(runs):
        rounds, baseline = run.of(RoundCompleted), place if len(runs) > 1 else -1
        lines += by_round(label(runs, run, "grown, committed"), rounds, "committed_accuracy", place)
        lines += by_round(label(runs, run, "baseline"), rounds, "baseline_accuracy", baseline, reference=True)
        if len(runs) == 1:
            tested += by_round("grown, test", rounds, "test_accuracy", 2)
            tested += by_round("same hosts alone, test", rounds, "alone_test_accuracy", 1, reference=True)
    if not lines:
        return note("Accuracy by round: no round was completed yet.")
    words = "Accuracy of the committed networks at the end of a round, on validation images" + (
        "; and on test images, beside the same hosts left alone." if tested else ", beside the baseline."
    )
    return line_figure("Accuracy by round", words, [*lines, *tested], "round", "accuracy, %")


def parameters_figure(runs: Sequence[Run]) -> str:
    """Number of parameters and accuracy of each host that completed its episode."""
    groups, rows = [], []
    for place, run in enumerate(runs):
        episodes = run.of(EpisodeCompleted)[-MAX_EPISODES:]
        if not episodes:
            continue
        sizes = [e.host_parameters + e.fossil_parameters for e in episodes]
        groups.append(Line(label(runs, run, "grown host"), sizes, [e.committed_accuracy for e in episodes], place))
        last = episodes[-1]
        alone = ([last.host_parameters], [last.baseline_accuracy], place if len(runs) > 1 else -1)
        groups.append(Line(label(runs, run, "left alone (baseline)"), *alone, reference=True))
        rows += [
            [
                label(runs, run, f"round {e.episode + 1}, host {e.env}"),
                f"{e.host_parameters + e.fossil_parameters:,}",
                number(e.committed_accuracy),
                number(e.baseline_accuracy),
                ", ".join(f"{slot} {blueprint}" for slot, blueprint in e.fossils.items()) or "nothing",
            ]
            for e in reversed(episodes)
        ]
    if not groups:
        return note("Accuracy against parameters: no host has completed its episode yet.")
    title = "Accuracy against parameters"
    words = "Each point is a committed network (host and fossils) at the end of its episode, on validation images."
    if any(len(run.of(EpisodeCompleted)) > MAX_EPISODES for run in runs):
        words += f" Only the newest {MAX_EPISODES} hosts of each run are drawn."
    chart = scatter_chart(title, groups, "parameters of the committed network", "validation accuracy, %")
    heads = ["host", "parameters", "committed, %", "baseline, %", "kept"]
    return figure(title, words, chart, table(heads, rows))
