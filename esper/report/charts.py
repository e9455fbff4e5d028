"""Charts of a report: lines with bands, points, intervals, stacked bars, and slots over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from esper.report.chart_style import MARKERS, PALETTE, REFERENCE, STAGE_COLORS, chart_style, inline_svg
from esper.report.html import MAX_ROWS, figure, note, table
from esper.report.lifecycles import Life, Stretch
from esper.telemetry.text import clean, number, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

WIDTH, HEIGHT, LANES_WIDTH = 5.0, 2.6, 10.0
"""Size of a chart without its legend, and width of a chart of slots, in inches."""
CHARACTER = 0.068
"""Approximate width of a character of a label, in inches."""
LANE, HOST_GAP = 0.19, 0.55
"""Height of a lane in inches, and the gap between two hosts in lanes."""
MAX_DRAWN = 1e30
"""Larger absolute values are not drawn: axes could overflow."""
MAX_NAME = 25
MAX_MARKED = 40
"""Max points of a line that have markers."""
MAX_BARS = 50
MAX_LANES = 96
"""Max lanes in one chart of slots."""


@dataclass(frozen=True)
class Line:
    """One line; ``low`` and ``high`` are its band. Values that cannot be drawn leave gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    """Index in the palette; -1 is the colour of references."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False

    def points(self) -> list[tuple[float, float]]:
        """Returns the (x, y) points that can be drawn."""
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if drawable(x) and drawable(y)]


@dataclass(frozen=True)
class Points:
    """Points of one kind in a scatter chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    reference: bool = False
    """Whether they are drawn as large diamonds, above the others."""


@dataclass(frozen=True)
class IntervalRow:
    """A value with its interval; ``low`` and ``high`` are None if it is unknown."""

    name: str
    value: float
    low: float | None
    high: float | None
    color: int = 0


def drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and abs(value) < MAX_DRAWN


def color(index: int) -> str:
    """Returns a colour of the palette, from the start again after its end; -1 is the colour of references."""
    return REFERENCE if index < 0 else PALETTE[index % len(PALETTE)]


@contextmanager
def _axes(height: float, width: float = WIDTH, left: float = 0.75, legend: Sequence[str] = ()) -> Iterator[Axes]:
    """Yields axes ``height`` inches high, with room above for a legend with these names."""
    with chart_style():
        from matplotlib.figure import Figure  # slow to import

        columns = _legend_columns(legend, width)
        above = 0.12 + (0.19 * math.ceil(len(legend) / columns) if len(legend) else 0.05)
        total = height + above + 0.5
        drawing = Figure(figsize=(width, total))
        axes = drawing.add_axes((left / width, 0.5 / total, (width - left - 0.15) / width, height / total))
        yield axes
        if legend:
            axes.legend(
                loc="lower left", bbox_to_anchor=((0.1 - left) / (width - left - 0.15), 1.01), ncols=columns,
                borderaxespad=0.2, columnspacing=1.2, handlelength=2.2,
            )  # fmt: skip


def _legend_columns(names: Sequence[str], width: float) -> int:
    longest = max((len(name) for name in names), default=1)
    return max(1, min(len(names), int(width / (CHARACTER * longest + 0.5))))


def _svg(axes: Axes, title: str, description: str) -> str:
    with chart_style():
        return inline_svg(axes.get_figure(), clean(title), clean(description, 1000))  # type: ignore[arg-type]


def _numbers(axis: Axis, integer: bool = False, logarithmic: bool = False) -> None:
    """Sets round ticks with short labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    ticks = MaxNLocator(6 if integer else 5, integer=integer, steps=[1, 2, 5, 10])
    axis.set_major_locator(LogLocator(subs=[1, 3]) if logarithmic else ticks)
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_label(value)))


def tick_label(value: float) -> str:
    """Returns a short label: ``1e-06``, ``0.05``, ``1,200``, ``25k``, ``2.5M``."""
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if least <= abs(value) < 1e13:
            return f"{value / unit:.6g}{letter}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e4 else f"{value:.6g}"


def _floats(values: Sequence[float]) -> list[float]:
    """Replaces values that cannot be drawn by NaN, which leaves gaps."""
    return [float(value) if drawable(value) else math.nan for value in values]


def line_chart(
    title: str, lines: Sequence[Line], x_label: str, y_label: str, digits: int = 2, include: Sequence[float] = ()
) -> str:
    """Draws lines over one another. The y axis contains the values ``include``."""
    names = [shorten(clean(line.name), 60) for line in lines]
    with _axes(HEIGHT, legend=names if len(names) > 1 else ()) as axes:
        for line, name in zip(lines, names, strict=True):
            x, shade = _floats(line.x), color(line.color)
            if len(line.low):
                low, high = _floats(line.low), _floats(line.high)
                axes.fill_between(x, low, high, color=shade, alpha=0.18, linewidth=0)
            marker = MARKERS[line.color % len(MARKERS)] if line.color >= 0 and len(x) <= MAX_MARKED else ""
            axes.plot(
                x, _floats(line.y), color=shade, linestyle="--" if line.dashed else "-", linewidth=1.6, label=name,
                marker=marker, markersize=3.5,
            )  # fmt: skip
        for value in include:
            axes.axhline(value, color="#aaaaaa", linewidth=0.8, zorder=0.5)
        _numbers(axes.xaxis, integer=True)
        _numbers(axes.yaxis)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.margins(x=0.02)
    ends = "; ".join(f"{line.name} ends at {number(line.points()[-1][1], digits)}" for line in lines if line.points())
    return _svg(axes, title, ends)


def line_figure(
    title: str,
    words: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    digits: int = 2,
    include: Sequence[float] = (),
) -> str:
    """Returns a line chart with its caption, and its numbers with ``digits`` decimals; "" without lines."""
    if not lines:
        return ""
    values = [dict(zip(line.x, line.y, strict=True)) for line in lines]
    places = sorted({x for column in values for x in column if drawable(x)})
    step = -(-len(places) // MAX_ROWS) or 1
    rows = [
        [number(x, 0), *(number(column[x], digits) if x in column else "" for column in values)] for x in places[::step]
    ]
    numbers = table([x_label, *(line.name for line in lines)], rows) + (
        note(f"Every {step}th row.") if step > 1 else ""
    )
    return figure(title, words, line_chart(title, lines, x_label, y_label, digits, include), numbers)


def scatter_chart(title: str, groups: Sequence[Points], x_label: str, y_label: str) -> str:
    """Draws points. The x axis is logarithmic if all x are positive and the largest is more than 30 times the least."""
    xs = [x for group in groups for x, y in zip(group.x, group.y, strict=True) if drawable(x) and drawable(y)]
    logarithmic = bool(xs) and min(xs) > 0 and max(xs) > 30 * min(xs)
    names = [shorten(clean(group.name), 60) for group in groups]
    with _axes(HEIGHT, legend=names) as axes:
        for group, name in zip(groups, names, strict=True):
            large = {"s": 70, "marker": "D", "edgecolors": "white", "zorder": 3}
            small = {"s": 22, "marker": MARKERS[group.color % len(MARKERS)], "alpha": 0.6, "linewidths": 0}
            style = large if group.reference else small
            axes.scatter(_floats(group.x), _floats(group.y), color=color(group.color), label=name, **style)  # type: ignore[arg-type]
        if logarithmic:
            axes.set_xscale("log", subs=[])
        _numbers(axes.xaxis, logarithmic=logarithmic)
        _numbers(axes.yaxis)
        axes.set(xlabel=x_label, ylabel=y_label)
    return _svg(axes, title, f"{sum(len(group.x) for group in groups)} points; each is a row of the table.")


def interval_chart(title: str, rows: Sequence[IntervalRow], x_label: str) -> str:
    """Draws one row per value, with a line at zero. An unbounded interval reaches the edge of the chart."""
    names = [shorten(clean(row.name), MAX_NAME) for row in rows]
    left = 0.3 + CHARACTER * 1.15 * max(map(len, names), default=0)
    ends = [v for row in rows for v in (row.value, row.low, row.high) if drawable(v)]
    low, high = min([0.0, *ends]), max([0.0, *ends])  # type: ignore[type-var]
    margin = (high - low) * 0.05 or 1.0
    with _axes(0.24 * max(1, len(rows)), left=left) as axes:
        for place, row in enumerate(rows):
            shade = color(row.color)
            if drawable(row.value):
                axes.plot(row.value, place, "o", color=shade, markersize=5)
                if row.low is not None and row.high is not None:
                    edges = [
                        row.low if drawable(row.low) else low - margin,
                        row.high if drawable(row.high) else high + margin,
                    ]
                    axes.plot(edges, [place, place], color=shade, linewidth=1.8)
            else:
                axes.text(low, place, number(row.value), va="center", color=REFERENCE)
        axes.axvline(0, color="#777777", linewidth=1)
        axes.set(xlabel=x_label, ylim=(len(rows) - 0.5, -0.5), xlim=(low - margin, high + margin))
        axes.set_yticks(range(len(rows)), names)
        axes.grid(visible=False, axis="y")
        _numbers(axes.xaxis)
    return _svg(axes, title, "; ".join(interval_words(row) for row in rows))


def interval_words(row: IntervalRow) -> str:
    known = row.low is not None and row.high is not None
    interval = f", {number(row.low)} to {number(row.high)}" if known else ""
    return f"{row.name}: {number(row.value, 2, 'pp', sign=True)}{interval}"


def grouped(values: Sequence[dict[str, float]], max_bars: int = MAX_BARS) -> list[tuple[int, int, dict[str, float]]]:
    """Averages neighbouring bars until at most ``max_bars`` are left; returns (first, last, parts), counted from 1."""
    size = -(-len(values) // max_bars) or 1
    bars = []
    for first in range(0, len(values), size):
        group = values[first : first + size]
        names = {name for parts in group for name in parts}
        means = {name: sum(parts.get(name, 0.0) for parts in group) / len(group) for name in names}
        bars.append((first + 1, first + len(group), means))
    return bars


def stacked_bars(
    title: str, bars: Sequence[tuple[str, dict[str, float]]], order: Sequence[str], x_label: str, y_label: str
) -> str:
    """Draws a bar for each (name, parts), stacked in ``order``; the position in ``order`` selects the colour."""
    places = range(len(bars))
    with _axes(HEIGHT, legend=order) as axes:
        level = [0.0] * len(bars)
        for index, part in enumerate(order):
            heights = [parts.get(part, 0.0) if drawable(parts.get(part)) else 0.0 for _, parts in bars]
            axes.bar(places, heights, bottom=level, color=color(index), label=part, edgecolor="white", linewidth=0.4)
            level = [below + height for below, height in zip(level, heights, strict=True)]
        every = -(-len(bars) // 10) or 1
        axes.set_xticks(places[::every], [shorten(clean(name), 12) for name, _ in bars[::every]])
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.margins(x=0.02 if len(bars) > 3 else 0.8)
        axes.grid(visible=False, axis="x")
        _numbers(axes.yaxis)
    return _svg(axes, title, "; ".join(f"{name}: {number(sum(parts.values()), 1)} s" for name, parts in bars))


def lanes_chart(title: str, lives: Sequence[Life], slots: Sequence[str], length: int) -> str:
    """Draws one lane per slot of each host, epochs from left to right; the colour of a bar is the stage of its seed."""
    pitch = len(slots) + HOST_GAP
    longest = max([length, 1, *(life.end for life in lives)])
    names = [
        shorten(clean(f"host {life.env}  {slot}" if not row else slot), 18)
        for life in lives
        for row, slot in enumerate(slots)
    ]
    stages = [s for s in STAGE_COLORS if any(stretch.stage == s for life in lives for stretch in life.stretches)]
    rollbacks = [(epoch, host) for host, life in enumerate(lives) for epoch in life.rollbacks]
    legend = [*(stage.lower() for stage in stages), *(["rollback"] if rollbacks else [])]
    left = 0.25 + CHARACTER * 1.1 * max(map(len, names), default=0)
    with _axes(LANE * (pitch * len(lives) - HOST_GAP), LANES_WIDTH, left, legend) as axes:
        per_epoch = (LANES_WIDTH - left - 0.15) / longest
        rows = {slot: row for row, slot in enumerate(slots)}
        shown = [
            (s, host * pitch + rows[s.slot])
            for host, life in enumerate(lives)
            for s in life.stretches
            if s.slot in rows
        ]
        ticks = [host * pitch + row for host in range(len(lives)) for row in range(len(slots))]
        axes.barh(ticks, longest, height=0.86, color="#f4f4f4")
        for stage in (*stages, ""):
            bars = [(s, row) for s, row in shown if (s.stage if s.stage in STAGE_COLORS else "") == stage]
            widths = [max(s.end - s.begin, 0.02 / per_epoch) for s, _ in bars]
            axes.barh(
                [row for _, row in bars], widths, left=[s.begin for s, _ in bars], height=0.86, edgecolor="white",
                color=STAGE_COLORS.get(stage, "#888888"), linewidth=0.5, label=stage.lower() or None,
            )  # fmt: skip
        for place, (epoch, host) in enumerate(rollbacks):
            ends = host * pitch - 0.5, host * pitch + len(slots) - 0.5
            axes.plot(
                [epoch, epoch], ends, color="black", linestyle=":", linewidth=1.4, label=None if place else "rollback"
            )
        for words, begin, row in _seed_names(shown, per_epoch):
            axes.text(begin + 0.04 / per_epoch, row, words, va="center", fontsize=7.5, clip_on=True)
        axes.set_yticks(ticks, names)
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.set(xlabel="epochs done", xlim=(0, longest), ylim=(pitch * len(lives) - HOST_GAP - 0.5, -0.5))
        _numbers(axes.xaxis, integer=True)
        axes.grid(visible=False, axis="y")
    return _svg(axes, title, "; ".join(life.words() for life in lives))


def _seed_names(shown: Sequence[tuple[Stretch, float]], inches_per_epoch: float) -> Iterator[tuple[str, float, float]]:
    """Yields (name, epoch, row) of each seed, if its life is long enough for the name of its blueprint."""
    for place, (first, row) in enumerate(shown):
        if first.stage != "GERMINATED" or not first.blueprint:
            continue
        end = first.end
        for later, other_row in shown[place + 1 :]:
            if other_row != row or later.stage in ("GERMINATED", "PRUNED"):
                break
            end = later.end
        room = int(((end - first.begin) * inches_per_epoch - 0.06) / CHARACTER)
        name = clean(first.blueprint)
        if room >= min(4, len(name)):
            yield shorten(name, room), first.begin, row
