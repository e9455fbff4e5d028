"""Plots of a comparison: every pair's accuracy, the differences with their intervals, and the cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from esper.evaluation.comparison import ComparisonResult
from esper.evaluation.statistics import ConfidenceInterval, Floats
from esper.report.chart_style import MARKERS, chart_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, DARK = "0.75", "0.2"
FORMATS = ("png", "svg", "pdf")


@chart_style()
def save_plots(result: ComparisonResult, folder: Path) -> list[Path]:
    """Saves all plots in ``folder``, each in every format, and returns their paths.

    Raises ImportError without matplotlib.
    """
    files = []
    for name, draw in (("pairs", draw_pairs), ("differences", draw_differences), ("cost", draw_cost)):
        figure = draw(result)
        for suffix in FORMATS:
            files.append(folder / f"{name}.{suffix}")
            figure.savefig(files[-1], dpi=120)
    return files


def draw_pairs(result: ComparisonResult) -> Figure:
    """Test accuracy of every host, one line per pair; mean and its interval for every arm."""
    names = list(result.hosts)
    figure, (axes,) = _panels(max(5.0, 1.5 + 1.2 * len(names)), 4.5)
    accuracy = result.metrics[0]
    values = np.array([accuracy.metric.values(result.hosts[name]) for name in names])  # [arms, pairs]
    places = np.arange(len(names))
    for number, pair in enumerate(values.T):
        label = "one pair" if number == 0 else None
        axes.plot(places, pair, color=GREY, linewidth=0.8, marker="o", markersize=3, label=label)
    if accuracy.missing is None:
        summaries = [accuracy.arms[name] for name in names]
        axes.errorbar(
            places,
            [summary.mean for summary in summaries],
            yerr=np.hstack([_error_bar(summary.mean, summary.mean_interval) for summary in summaries]),
            fmt="D",
            color=DARK,
            markersize=6,
            capsize=4,
            label="mean, 95 % interval",
            zorder=3,
        )
    axes.set_xticks(places, [short(name) for name in names], rotation=30, ha="right")
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set(ylabel=_axis(result), title=f"{short(result.task)}: {_counted(result)}")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw_differences(result: ComparisonResult) -> Figure:
    """Mean paired difference of every arm to the reference with its interval, one panel per metric.

    Metrics in which all hosts are equal are left out, except for the first one.
    """
    differing = [found for found in result.metrics[1:] if found.metric.common(result.hosts) is None]
    shown = [found for found in (result.metrics[0], *differing) if found.missing is None]
    columns = 3
    rows = max(1, -(-len(shown) // columns))
    figure, panels = _panels(11, 0.6 + rows * (0.78 + 0.32 * len(result.arms)), nrows=rows, ncols=columns)
    for number, (axes, found) in enumerate(zip(panels, shown, strict=False)):
        names = list(found.comparisons)
        for place, compared in enumerate(found.comparisons.values()):
            pair, color = compared.pair, "C0" if compared.conclusive else "0.5"
            error = _error_bar(pair.difference, pair.interval)
            axes.errorbar(pair.difference, place, xerr=error, fmt="o", color=color, capsize=3, markersize=4)
        axes.axvline(0, color=DARK, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(names)), [short(name) for name in names] if number % columns == 0 else [])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_title(found.metric.label, fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    figure.suptitle(
        f"{short(result.task)}: difference to {short(result.reference)}, mean of {_counted(result)} and 95 % "
        "interval\nblue: evidence of a difference (corrected p < 0.05), grey: none",
        fontsize=10,
    )
    return figure


def draw_cost(result: ComparisonResult) -> Figure:
    """Test accuracy of every host against its parameters and, if counted, its compute; large markers are means."""
    costs = [("parameters", 1.0, "parameters")]
    if np.isfinite(next(iter(result.hosts.values()))[0].flops):
        costs.append(("flops", 1e9, "compute, GFLOP"))
    figure, panels = _panels(10 if len(costs) == 2 else 5.5, 4.5, ncols=len(costs), sharey=True)
    for axes, (cost, unit, label) in zip(panels, costs, strict=True):
        for number, (name, hosts) in enumerate(result.hosts.items()):
            x = np.array([getattr(host, cost) / unit for host in hosts])
            y = result.metrics[0].metric.values(hosts)
            color, marker = f"C{number % 10}", MARKERS[number % len(MARKERS)]
            axes.scatter(x, y, color=color, marker=marker, s=12, alpha=0.4, linewidths=0)
            legend = short(name) if axes is panels[0] else None
            axes.scatter(x.mean(), y.mean(), color=color, marker=marker, s=80, edgecolors=DARK, zorder=3, label=legend)
        axes.set_xlabel(label)
    panels[0].set_ylabel(_axis(result))
    figure.suptitle(f"{short(result.task)}: {_counted(result)}; small: hosts, large: means", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _counted(result: ComparisonResult) -> str:
    """``10 pairs``, or ``50 pairs of 5 training seeds``."""
    seeds = f" of {result.train_seeds} training seeds" if result.train_seeds else ""
    return f"{result.pairs} pairs{seeds}"


def _axis(result: ComparisonResult) -> str:
    """Returns the name and the unit of the test score, such as "test accuracy, %"."""
    label = result.metrics[0].metric.label
    return f"t{label[1:]}"


def _panels(width: float, height: float, **grid: Any) -> tuple[Figure, list[Axes]]:
    """Returns a figure of this size in inches, and its panels row by row; ``grid`` as in ``Figure.subplots``."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(squeeze=False, **grid).ravel())


def _error_bar(middle: float, limits: ConfidenceInterval) -> Floats:
    """Distances [2, 1] from ``middle`` to the limits below and above; 0 if the interval is unbounded."""
    distances = np.array([[middle - limits.low], [limits.high - middle]])
    return np.where(np.isfinite(distances), distances.clip(min=0), 0.0)


def short(name: str, max_length: int = 24) -> str:
    """Shortens a name to its last characters, because paths differ at the end."""
    return name if len(name) <= max_length else f"...{name[3 - max_length :]}"
