"""Accuracy of hosts beside hosts left alone, and its cost in parameters."""

from __future__ import annotations

from collections.abc import Sequence

from esper.report.charts import Line, Plot, Point, line_chart, scatter_chart
from esper.report.curves import by_epoch, epochs_of, shown_rounds
from esper.report.figure import figure, figures, legend, lines_legend, lines_table, note, section, table
from esper.report.read import Run
from esper.report.svg import Ids
from esper.report.text import number
from esper.telemetry.event import BaselineMeasured, EpisodeCompleted, EpochCompleted, RoundCompleted

NEWEST_EPISODES = 400


def accuracy_section(ids: Ids, runs: Sequence[Run]) -> str:
    return section(
        "accuracy",
        "Accuracy",
        figures(epochs_figure(ids, runs), rounds_figure(ids, runs), parameters_figure(ids, runs)),
    )


def epochs_figure(ids: Ids, runs: Sequence[Run]) -> str:
    """Validation accuracy by epoch, with the baseline."""
    lines, about = [], []
    for place, run in enumerate(runs):
        chosen, words = shown_rounds(run)
        epochs = epochs_of(run, chosen)
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        about.append(prefix + words)
        if epochs:
            lines.append(_grown(f"{prefix}grown", epochs, place, band=len(runs) == 1))
        if len(runs) == 1 and epochs:
            lines += _more_of_one(run, chosen, epochs)
    lines += _baselines(runs)
    words = f"Validation accuracy, mean over hosts: {'; '.join(about)}."
    if len(runs) == 1:
        words += " Shaded: the middle 80 % of the hosts. Committed: host and fossils only."
    plot = Plot("Accuracy by epoch", _last_values(lines), "epochs done", "validation accuracy, %", "%")
    if not lines:
        return note("Accuracy by epoch: no epochs and no baseline were logged.")
    drawing = line_chart(ids, plot, lines)
    return figure(plot.title, words, drawing, lines_legend(lines), lines_table("epoch", lines))


def _grown(name: str, epochs: Sequence[EpochCompleted], colour: int, band: bool) -> Line:
    curve = by_epoch(epochs, lambda e: e.validation_accuracy)
    return Line(name, curve.x, curve.mean, colour, curve.low if band else (), curve.high if band else ())


def _baselines(runs: Sequence[Run]) -> list[Line]:
    """Returns the baseline lines: a single one for all runs that share a baseline, as with the same task and seed."""
    found: dict[tuple[float, ...], list[int]] = {}
    for place, run in enumerate(runs):
        baseline = run.last(BaselineMeasured)
        if baseline is not None:
            found.setdefault(baseline.accuracy, []).append(place)
    lines = []
    for accuracy, places in found.items():
        shared = len(places) == len(runs)
        prefix = "" if shared else f"{', '.join(runs[place].name for place in places)}: "
        x = [float(epoch) for epoch in range(len(accuracy))]
        colour = -1 if shared or len(places) > 1 else places[0]
        lines.append(Line(f"{prefix}left alone (baseline)", x, accuracy, colour, dashed=True))
    return lines


def _more_of_one(run: Run, chosen: set[int], epochs: Sequence[EpochCompleted]) -> list[Line]:
    committed = by_epoch(epochs, lambda e: e.committed_accuracy)
    lines = [Line("committed", committed.x, committed.mean, 2)]
    if run.learns and 0 not in chosen:
        first = by_epoch(epochs_of(run, {0}), lambda e: e.validation_accuracy)
        lines.append(Line("grown in round 1", first.x, first.mean, 1))
    return lines


def _last_values(lines: Sequence[Line]) -> str:
    """Describes where each line ends, for readers who cannot see the chart."""
    ends = [(line.name, line.rows()) for line in lines]
    return "; ".join(f"{name} ends at {number(rows[-1][1])}" for name, rows in ends if rows)


def rounds_figure(ids: Ids, runs: Sequence[Run]) -> str:
    """Accuracy at the end of each round."""
    lines, tested = [], False
    for place, run in enumerate(runs):
        rounds = run.of(RoundCompleted)
        x = [float(event.round) for event in rounds]
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        if not rounds:
            continue
        lines.append(Line(f"{prefix}grown, committed", x, [e.committed_accuracy for e in rounds], place))
        colour = place if len(runs) > 1 else -1
        lines.append(
            Line(f"{prefix}baseline", x, [e.baseline_accuracy for e in rounds], colour, dashed=True),
        )
        test = [(float(e.round), e.test_accuracy, e.alone_test_accuracy) for e in rounds]
        both = [(n, grown, alone) for n, grown, alone in test if grown is not None and alone is not None]
        if both and len(runs) == 1:
            tested = True
            places = [n for n, _, _ in both]
            lines.append(Line("grown, test", places, [grown for _, grown, _ in both], 2))
            lines.append(Line("same hosts alone, test", places, [alone for _, _, alone in both], 1, dashed=True))
    plot = Plot("Accuracy by round", _last_values(lines), "round", "accuracy, %", "%")
    if not lines:
        return note("Accuracy by round: no round was completed yet.")
    words = "Accuracy of the committed networks at the end of a round, on validation images" + (
        "; and on test images, beside the same hosts left alone." if tested else ", beside the baseline."
    )
    drawing = line_chart(ids, plot, lines)
    return figure(plot.title, words, drawing, lines_legend(lines), lines_table("round", lines))


def parameters_figure(ids: Ids, runs: Sequence[Run]) -> str:
    """Number of parameters and accuracy of each host that completed its episode."""
    points, rows, names = [], [], []
    for place, run in enumerate(runs):
        episodes = run.of(EpisodeCompleted)[-NEWEST_EPISODES:]
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        for e in episodes:
            total = e.host_parameters + e.fossil_parameters
            kept = ", ".join(f"{slot} {blueprint}" for slot, blueprint in e.fossils.items()) or "nothing"
            words = f"{prefix}round {e.episode + 1}, host {e.env}: {number(e.committed_accuracy)} %, {total:,}; {kept}"
            points.append(Point(total, e.committed_accuracy, place, words))
        if episodes:
            names.append((f"c{place} point", f"{prefix}grown host"))
            first = episodes[-1]
            words = f"{prefix}left alone: {number(first.baseline_accuracy)} %, {first.host_parameters:,} parameters"
            style = place if len(runs) > 1 else -1
            points.append(Point(first.host_parameters, first.baseline_accuracy, style, words, large=True))
            names.append((f"c{place if len(runs) > 1 else 'b'} diamond", f"{prefix}left alone (baseline)"))
        rows += [
            [
                f"{prefix}round {e.episode + 1}, host {e.env}",
                f"{e.host_parameters + e.fossil_parameters:,}",
                number(e.committed_accuracy),
                number(e.baseline_accuracy),
                ", ".join(f"{slot} {blueprint}" for slot, blueprint in e.fossils.items()) or "nothing",
            ]
            for e in reversed(episodes)
        ]
    if not points:
        return note("Accuracy against parameters: no host has completed its episode yet.")
    plot = Plot(
        "Accuracy against parameters",
        f"{len(rows)} grown hosts; each is a row of the table.",
        "parameters of the committed network",
        "validation accuracy, %",
        "%",
    )
    heads = ["host", "parameters", "committed, %", "baseline, %", "kept"]
    words = "Each point is a committed network (host and fossils) at the end of its episode, on validation images."
    if any(len(run.of(EpisodeCompleted)) > NEWEST_EPISODES for run in runs):
        words += f" Only the newest {NEWEST_EPISODES} hosts of each run are drawn."
    return figure(plot.title, words, scatter_chart(ids, plot, points), legend(names), table(heads, rows))
