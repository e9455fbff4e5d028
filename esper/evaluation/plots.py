"""Plots of a comparison: every pair's accuracy, the differences with their intervals, and the cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from esper.evaluation.comparison import Outcome
from esper.stats.samples import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, DARK = "0.75", "0.2"
MARKERS = "osD^vP*X<>"


def save_plots(outcome: Outcome, folder: Path) -> list[Path]:
    """Saves all plots as PNG in ``folder`` and returns their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pictures: dict[str, Callable[[Outcome], Figure]] = {
        "pairs.png": draw_pairs,
        "differences.png": draw_differences,
        "cost.png": draw_cost,
    }
    files = []
    for name, draw in pictures.items():
        file = folder / name
        draw(outcome).savefig(file, dpi=120)
        files.append(file)
    return files


def draw_pairs(outcome: Outcome) -> Figure:
    """Test accuracy of every host, one line per pair; mean and its interval for every arm."""
    from matplotlib.figure import Figure

    names = list(outcome.hosts)
    figure = Figure(figsize=(max(5.0, 1.5 + 1.2 * len(names)), 4.5), layout="constrained")
    axes = figure.subplots()
    values = np.array([[host.accuracy for host in outcome.hosts[name]] for name in names])  # [arms, pairs]
    places = np.arange(len(names))
    for number, pair in enumerate(values.T):
        axes.plot(places, pair, color=GREY, linewidth=0.8, marker="o", markersize=3, label=_once("one pair", number))
    findings = outcome.findings[0]
    if findings.missing is None:
        means = np.array([findings.arms[name].mean for name in names])
        errors = np.array([_reach(means[i], findings.arms[name].mean_interval) for i, name in enumerate(names)]).T
        axes.errorbar(
            places,
            means,
            yerr=errors,
            fmt="D",
            color=DARK,
            markersize=6,
            capsize=4,
            label="mean, 95 % interval",
            zorder=3,
        )
    axes.set_xticks(places, [short(name) for name in names], rotation=30, ha="right")
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set(ylabel="test accuracy, %", title=f"{_task(outcome)}: {outcome.pairs} pairs")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw_differences(outcome: Outcome) -> Figure:
    """Mean paired difference of every arm to the reference with its interval, one panel per metric."""
    from matplotlib.figure import Figure

    shown = [findings for findings in outcome.findings if findings.missing is None]
    columns = 3
    rows = -(-len(shown) // columns)
    arms = len(outcome.arms) - 1
    figure = Figure(figsize=(11, 0.6 + rows * (1.1 + 0.32 * arms)), layout="constrained")
    panels = figure.subplots(max(1, rows), columns, squeeze=False).ravel()
    for number, (axes, findings) in enumerate(zip(panels, shown, strict=False)):
        names = list(findings.versus)
        for place, name in enumerate(names):
            found = findings.versus[name]
            reach = np.array([_reach(found.pair.difference, found.pair.interval)]).T
            color = "C0" if found.conclusive else "0.5"
            axes.errorbar(found.pair.difference, place, xerr=reach, fmt="o", color=color, capsize=3, markersize=4)
        axes.axvline(0, color=DARK, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(names)), [short(name) for name in names] if number % columns == 0 else [])
        axes.set_ylim(len(names) - 0.5, -0.5)
        metric = findings.metric
        axes.set_title(f"{metric.title}{f', {metric.unit}' if metric.unit else ''}", fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    told = "blue: evidence of a difference (corrected p < 0.05), grey: none"
    figure.suptitle(
        f"{_task(outcome)}: difference to {short(outcome.reference)}, mean of {outcome.pairs} pairs and 95 % interval\n"
        f"{told}",
        fontsize=10,
    )
    return figure


def draw_cost(outcome: Outcome) -> Figure:
    """Test accuracy of every host against its parameters and, if counted, its compute; large markers are means."""
    from matplotlib.figure import Figure

    some = next(iter(outcome.hosts.values()))[0]
    counted = bool(np.isfinite(some.flops))
    figure = Figure(figsize=(10 if counted else 5.5, 4.5), layout="constrained")
    panels = figure.subplots(1, 2 if counted else 1, sharey=True, squeeze=False).ravel()
    _scatter(outcome, panels[0], "parameters", 1.0, "parameters", labelled=True)
    if counted:
        _scatter(outcome, panels[1], "flops", 1e9, "compute, GFLOP", labelled=False)
    panels[0].set_ylabel("test accuracy, %")
    figure.suptitle(f"{_task(outcome)}: {outcome.pairs} pairs; small: hosts, large: means", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _scatter(outcome: Outcome, axes: Axes, price: str, unit: float, label: str, labelled: bool) -> None:
    for number, (name, hosts) in enumerate(outcome.hosts.items()):
        x = np.array([getattr(host, price) / unit for host in hosts])
        y = np.array([host.accuracy for host in hosts])
        color, marker = f"C{number % 10}", MARKERS[number % len(MARKERS)]
        axes.scatter(x, y, color=color, marker=marker, s=12, alpha=0.4, linewidths=0)
        legend = short(name) if labelled else None
        axes.scatter(x.mean(), y.mean(), color=color, marker=marker, s=80, edgecolors=DARK, zorder=3, label=legend)
    axes.set_xlabel(label)


def _reach(middle: float, limits: Interval) -> tuple[float, float]:
    """Distances from ``middle`` to the limits below and above; 0 if the interval is unbounded."""
    if not np.isfinite(limits.low):
        return (0.0, 0.0)
    return (max(0.0, middle - limits.low), max(0.0, limits.high - middle))


def _once(label: str, number: int) -> str | None:
    return label if number == 0 else None


def _task(outcome: Outcome) -> str:
    return short(outcome.task)


def short(name: str, most: int = 24) -> str:
    """Shortens a name to its last characters, at most ``most`` in all, because paths differ at the end."""
    return name if len(name) <= most else f"...{name[3 - most :]}"
