"""Plots of a comparison: every pair's accuracy, the differences with their intervals, and the cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from esper.compare.comparison import ComparisonResult
from esper.compare.runner import HostResult
from esper.compare.statistics import ConfidenceInterval, Floats
from esper.show.charts import MARKERS, chart_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "0.75"
DARK = "0.2"
FORMATS = ("png", "svg", "pdf")
PANELS_A_ROW = 3


@chart_style()
def save_plots(result: ComparisonResult, folder: Path) -> list[Path]:
    """Saves all plots in ``folder``, each in every format, and returns their paths.

    Raises ImportError without matplotlib.
    """
    charts = {"pairs": draw_pairs, "differences": draw_differences, "cost": draw_cost}
    files = []
    for name, draw in charts.items():
        figure = draw(result)
        for suffix in FORMATS:
            file = folder / f"{name}.{suffix}"
            figure.savefig(file, dpi=120)
            files.append(file)
    return files


def draw_pairs(result: ComparisonResult) -> Figure:
    """Test accuracy of every host, one line per pair; mean and its interval for every arm."""
    names = list(result.hosts)
    width = max(5.0, 1.5 + 1.2 * len(names))
    figure, (axes,) = _panels(width, 4.5)
    primary = result.metrics[0]
    values = np.array([primary.metric.values(hosts) for hosts in result.hosts.values()])  # [arms, pairs]
    places = np.arange(len(names))
    for number, pair in enumerate(values.T):
        axes.plot(
            places,
            pair,
            color=GREY,
            linewidth=0.8,
            marker="o",
            markersize=3,
            label="one pair" if number == 0 else None,  # one entry of the legend stands for all
        )
    if primary.missing is None:
        means = []
        bars = []
        for name in names:
            summary = primary.arms[name]
            means.append(summary.mean)
            bars.append(_error_bar(summary.mean, summary.mean_interval))
        axes.errorbar(
            places,
            means,
            yerr=np.hstack(bars),
            fmt="D",
            color=DARK,
            markersize=6,
            capsize=4,
            label="mean, 95 % interval",
            zorder=3,
        )
    axes.set_xticks(places, list(map(short, names)), rotation=30, ha="right")
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylabel(_axis(result))
    axes.set_title(f"{short(result.task)}: {_counted(result)}")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw_differences(result: ComparisonResult) -> Figure:
    """Mean paired difference of every arm to the reference with its interval, one panel per metric.

    Metrics in which all hosts are equal are left out, except for the first one.
    """
    shown = []
    for number, metric_result in enumerate(result.metrics):
        metric = metric_result.metric
        differs = number == 0 or (metric.judged and metric.common(result.hosts) is None)
        if differs and metric_result.missing is None:
            shown.append(metric_result)
    rows = max(1, -(-len(shown) // PANELS_A_ROW))  # rounded up
    height = 0.6 + rows * (0.78 + 0.32 * len(result.arms))
    figure, panels = _panels(11, height, rows, PANELS_A_ROW)
    for number, metric_result in enumerate(shown):
        axes = panels[number]
        comparisons = metric_result.comparisons
        for place, comparison in enumerate(comparisons.values()):
            pair = comparison.pair
            axes.errorbar(
                pair.difference,
                place,
                xerr=_error_bar(pair.difference, pair.interval),
                fmt="o",
                color="C0" if comparison.conclusive else "0.5",
                capsize=3,
                markersize=4,
            )
        axes.axvline(0, color=DARK, linewidth=0.8, linestyle=":")
        # Names stand beside the first panel of a row only.
        names = [] if number % PANELS_A_ROW else list(map(short, comparisons))
        axes.set_yticks(range(len(comparisons)), names)
        axes.set_ylim(len(comparisons) - 0.5, -0.5)
        axes.set_title(metric_result.metric.label, fontsize=9)
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
    first_arm = next(iter(result.hosts.values()))
    if np.isfinite(first_arm[0].flops):
        figure, panels = _panels(10, 4.5, columns=2, share_y=True)
    else:
        figure, panels = _panels(5.5, 4.5, share_y=True)
    _draw_hosts(panels[0], result, lambda host: host.parameters, labelled=True)
    panels[0].set_xlabel("parameters")
    for axes in panels[1:]:
        _draw_hosts(axes, result, lambda host: host.flops / 1e9, labelled=False)
        axes.set_xlabel("compute, GFLOP")
    panels[0].set_ylabel(_axis(result))
    figure.suptitle(f"{short(result.task)}: {_counted(result)}; small: hosts, large: means", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _draw_hosts(
    axes: Axes,
    result: ComparisonResult,
    cost: Callable[[HostResult], float],
    labelled: bool,
) -> None:
    """Draws the test score of every host against its cost, and the mean of every arm; ``labelled``: for the legend."""
    for number, (name, hosts) in enumerate(result.hosts.items()):
        x = np.array(list(map(cost, hosts)))
        y = result.metrics[0].metric.values(hosts)
        color = f"C{number % 10}"
        marker = MARKERS[number % len(MARKERS)]
        axes.scatter(
            x,
            y,
            color=color,
            marker=marker,
            s=12,
            alpha=0.4,
            linewidths=0,
        )
        axes.scatter(
            x.mean(),
            y.mean(),
            color=color,
            marker=marker,
            s=80,
            edgecolors=DARK,
            zorder=3,
            label=short(name) if labelled else None,
        )


def _counted(result: ComparisonResult) -> str:
    """``10 pairs``, or ``50 pairs of 5 training seeds``."""
    pairs = f"{result.pairs} pairs"
    if not result.train_seeds:
        return pairs
    return f"{pairs} of {result.train_seeds} training seeds"


def _axis(result: ComparisonResult) -> str:
    """Returns the name and the unit of the test score, such as "test accuracy, %"."""
    label = result.metrics[0].metric.label
    return f"t{label[1:]}"


def _panels(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    share_y: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of this size in inches, and its panels row by row."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=share_y, squeeze=False)
    return figure, list(grid.ravel())


def _error_bar(middle: float, limits: ConfidenceInterval) -> Floats:
    """Distances [2, 1] from ``middle`` to the limits below and above; 0 if the interval is unbounded."""
    distances = np.array([[middle - limits.low], [limits.high - middle]])
    return np.where(np.isfinite(distances), distances.clip(min=0), 0.0)


def short(name: str, max_length: int = 24) -> str:
    """Shortens a name to its last characters, because paths differ at the end."""
    if len(name) <= max_length:
        return name
    return f"...{name[3 - max_length :]}"
