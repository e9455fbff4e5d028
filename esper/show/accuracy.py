"""Accuracy, or another score, of hosts beside hosts left alone, and its cost in parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from esper.show.charts import Line, by_round, line_figure, scatter_chart
from esper.show.curves import by_epoch, label, score_of, shown_epochs
from esper.show.html import figure, figures, note, section, table
from esper.show.read import Run, Runs
from esper.telemetry.event import BaselineMeasured, EpisodeCompleted, EpochCompleted, RoundCompleted
from esper.telemetry.score import ScoreUnit

MAX_EPISODES = 400
"""Max hosts of a run in the chart of parameters."""


def accuracy_section(runs: Runs) -> str:
    content = figures(
        epochs_figure(runs),
        rounds_figure(runs),
        parameters_figure(runs),
    )
    return section("accuracy", capital(score_of(runs).name), content)


def capital(name: str) -> str:
    """Returns the name of a score as the start of a title; names with capitals of their own stay as they are."""
    if name.islower():
        return name.capitalize()
    return name


def _baseline_color(runs: Runs, place: int) -> int:
    """Returns the colour of a run's baseline: that of references, or that of the run if several are shown."""
    if len(runs) > 1:
        return place
    return -1


def epochs_figure(runs: Runs) -> str:
    """Validation accuracy by epoch, with the baseline; for a single run also the worst and the best host."""
    score = score_of(runs)
    title = f"{capital(score.name)} by epoch"
    lines: list[Line] = []
    rounds = []
    for place, run in enumerate(runs):
        epochs, words = shown_epochs(run)
        rounds.append(label(runs, run, words))
        if epochs:
            lines += _grown(runs, place, epochs, score)
    lines += _baselines(runs, score)
    if not lines:
        return note(f"{title}: no epochs and no baseline were logged.")
    words = f"Validation {score.name}, mean over hosts: {'; '.join(rounds)}."
    if len(runs) == 1:
        if any(line.name == "best host" for line in lines):
            words += " Shaded: the middle 80 % of the hosts. Best and worst: the hosts with the highest and the lowest "
            words += f"{score.name} at each epoch."
        words += " Committed: host and fossils only."
    return line_figure(
        title,
        words,
        lines,
        "epochs done",
        score.label(f"validation {score.name}"),
    )


def _grown(
    runs: Runs,
    place: int,
    epochs: Sequence[EpochCompleted],
    score: ScoreUnit,
) -> list[Line]:
    run = runs[place]
    curve = by_epoch(epochs, lambda e: score.of(e.validation_accuracy))
    if len(runs) > 1:
        return [Line(label(runs, run, "grown"), curve.x, curve.mean, place)]
    lines = [Line("grown", curve.x, curve.mean, 0, curve.low, curve.high)]
    if curve.best != curve.worst:
        lines.append(Line("best host", curve.x, curve.best, 5))
        lines.append(Line("worst host", curve.x, curve.worst, 4))
    committed = by_epoch(epochs, lambda e: score.of(e.committed_accuracy))
    lines.append(Line("committed", committed.x, committed.mean, 2))
    # An agent that learns is shown by its last rounds; its first round is drawn beside them.
    if run.view.learns and all(e.episode for e in epochs):
        earliest = (e for e in run.of(EpochCompleted) if not e.episode)
        first = by_epoch(earliest, lambda e: score.of(e.validation_accuracy))
        lines.append(Line("grown in round 1", first.x, first.mean, 1))
    return lines


def _baselines(runs: Runs, score: ScoreUnit) -> list[Line]:
    """Returns the baseline lines: a single one for all runs that share a baseline, as with the same task and seed."""
    owners: dict[tuple[float, ...], list[int]] = {}
    for place, run in enumerate(runs):
        baseline = run.last(BaselineMeasured)
        if baseline:
            owners.setdefault(baseline.accuracy, []).append(place)
    lines = []
    for accuracy, places in owners.items():
        name = "left alone (baseline)"
        if len(places) < len(runs):
            name = f"{', '.join(runs[place].name for place in places)}: {name}"
        shade = -1
        if len(places) == 1:
            shade = _baseline_color(runs, places[0])
        curve = list(map(score.of, accuracy))
        lines.append(Line(name, range(len(curve)), curve, shade, reference=True))
    return lines


def rounds_figure(runs: Runs) -> str:
    """Accuracy, or another score, at the end of each round."""
    score = score_of(runs)
    unit = score.points
    title = f"{capital(score.name)} by round"
    lines: list[Line] = []
    tested: list[Line] = []
    for place, run in enumerate(runs):
        rounds = run.of(RoundCompleted)
        lines += by_round(label(runs, run, "grown, committed"), rounds, "committed_accuracy", place, unit=unit)
        if run.view.has_baseline:
            left_alone = label(runs, run, "baseline")
            shade = _baseline_color(runs, place)
            lines += by_round(left_alone, rounds, "baseline_accuracy", shade, reference=True, unit=unit)
        if len(runs) == 1:
            tested += by_round("grown, test", rounds, "test_accuracy", 2, unit=unit)
            tested += by_round("same hosts alone, test", rounds, "alone_test_accuracy", 1, reference=True, unit=unit)
    if not lines:
        return note(f"{title}: no round was completed yet.")
    words = f"{capital(score.name)} of the committed networks at the end of a round, on validation images"
    if tested:
        words += "; and on test images, beside the same hosts left alone"
    elif any(line.reference for line in lines):
        words += ", beside the baseline"
    return line_figure(
        title,
        f"{words}.",
        lines + tested,
        "round",
        score.label(score.name),
    )


def parameters_figure(runs: Runs) -> str:
    """Number of parameters and accuracy, or other score, of each host that completed its episode."""
    score = score_of(runs)
    title = f"{capital(score.name)} against parameters"
    groups = []
    rows: list[list[str]] = []
    for place, run in enumerate(runs):
        episodes = run.of(EpisodeCompleted)[-MAX_EPISODES:]
        if not episodes:
            continue
        sizes = []
        scores = []
        for e in episodes:
            sizes.append(e.host_parameters + e.fossil_parameters)
            scores.append(score.of(e.committed_accuracy))
        groups.append(Line(label(runs, run, "grown host"), sizes, scores, place))
        if run.view.has_baseline:
            last = episodes[-1]
            baseline = Line(
                label(runs, run, "left alone (baseline)"),
                [last.host_parameters],
                [score.of(last.baseline_accuracy)],
                _baseline_color(runs, place),
                reference=True,
            )
            groups.append(baseline)
        rows += _host_rows(runs, run, episodes, score)
    if not groups:
        return note(f"{title}: no host has completed its episode yet.")
    words = "Each point is a committed network (host and fossils) at the end of its episode, on validation images. "
    words += "FLOPs are the floating-point operations of a forward pass, a sample. "
    words += f"At most the newest {MAX_EPISODES} hosts of each run are drawn."
    axis = score.label(f"validation {score.name}")
    chart = scatter_chart(title, groups, "parameters of the committed network", axis)
    heads = [
        "host",
        "parameters",
        "FLOPs",
        score.label("committed"),
        score.label("baseline"),
        "kept",
    ]
    return figure(title, words, chart, table(heads, rows))


def _host_rows(
    runs: Runs,
    run: Run,
    episodes: Sequence[EpisodeCompleted],
    score: ScoreUnit,
) -> Iterator[list[str]]:
    """Yields a row of the table for each host of a run, the newest first."""
    for e in reversed(episodes):
        baseline = None
        if run.view.has_baseline:
            baseline = e.baseline_accuracy
        kept = ", ".join(map(" ".join, e.fossils.items()))
        yield [
            label(runs, run, f"round {e.episode + 1}, host {e.env}"),
            f"{e.host_parameters + e.fossil_parameters:,}",
            f"{e.host_flops + e.fossil_flops:,.0f}",
            score.value(e.committed_accuracy, unit=False),
            score.value(baseline, unit=False),
            kept or "nothing",
        ]
