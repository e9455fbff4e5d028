"""Charts of a report: lines with bands, points, intervals, stacked bars, and slots over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esper.report.chart_style import MARKERS, PALETTE, REFERENCE, chart_style, inline_svg
from esper.report.html import MAX_ROWS, figure, note, table
from esper.telemetry.seed_history import Life, Stretch
from esper.telemetry.stages import STAGE_COLORS
from esper.telemetry.text import clean, number, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, LANES_WIDTH = 4.4, 2.4, 10.0
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
    """A line, or points of one kind; ``low`` and ``high`` are its band. Values that cannot be drawn leave gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    """Index in the palette; -1 is the colour of references."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    reference: bool = False
    """Whether others are compared with it: a dashed line, or large diamonds above other points."""

    def points(self) -> list[tuple[float, float]]:
        """Returns the (x, y) points that can be drawn."""
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if drawable(x) and drawable(y)]


def by_round(
    name: str, events: Sequence[Any], field: str, color: int, reference: bool = False, unit: float = 1.0
) -> list[Line]:
    """Returns a line through that field of the events, divided by ``unit``, by round; empty if no event has a value."""
    points = {event.round: value / unit for event in events if (value := getattr(event, field)) is not None}
    return [Line(name, list(points), list(points.values()), color, reference=reference)] if points else []


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


def _axes(height: float, width: float = WIDTH, left: float = 0.75, legend: Sequence[str] = ()) -> Axes:
    """Returns axes ``height`` inches high, with room above them for a legend with these names."""
    from matplotlib.figure import Figure  # slow to import

    above = 0.17 + 0.19 * math.ceil(len(legend) / _legend_columns(legend, width))
    total = height + above + 0.5
    drawing = Figure(figsize=(width, total))
    return drawing.add_axes((left / width, 0.5 / total, (width - left - 0.15) / width, height / total))


def _legend_columns(names: Sequence[str], width: float) -> int:
    longest = max((len(name) for name in names), default=1)
    return max(1, min(len(names), int(width / (CHARACTER * longest + 0.5))))


def _svg(axes: Axes, title: str, description: str, legend: Sequence[str] = ()) -> str:
    """Returns the chart, with a legend above the axes if ``legend`` has names."""
    drawing = axes.figure
    if legend:
        width, box = drawing.get_figure(root=True).get_figwidth(), axes.get_position()
        anchor = (0.1 / width - box.x0) / box.width, 1.01
        columns = _legend_columns(legend, width)
        axes.legend(loc="lower left", bbox_to_anchor=anchor, ncols=columns, borderaxespad=0.2, columnspacing=1.2)
    return inline_svg(drawing, clean(title), clean(description, 1000))  # type: ignore[arg-type]


def _label(axes: Axes, x_label: str, y_label: str = "", integer: bool = False, logarithmic: bool = False) -> None:
    """Names the axes and sets round ticks with short labels; ``integer`` and ``logarithmic`` are about x."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    axes.set(xlabel=x_label, ylabel=y_label)
    formatter = FuncFormatter(lambda value, _: tick_label(value))
    steps = MaxNLocator(6 if integer else 5, integer=integer, steps=[1, 2, 5, 10], min_n_ticks=1)
    axes.xaxis.set_major_locator(LogLocator(subs=[1, 3]) if logarithmic else steps)
    axes.xaxis.set_major_formatter(formatter)
    if y_label:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(formatter)


def tick_label(value: float) -> str:
    """Returns a short label: ``1e-06``, ``0.05``, ``1,200``, ``25k``, ``2.5M``."""
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if least <= abs(value) < 1e13:
            return f"{value / unit:.6g}{letter}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e4 else f"{value:.6g}"


def _floats(values: Sequence[float]) -> list[float]:
    """Replaces values that cannot be drawn by NaN, which leaves gaps."""
    return [float(value) if drawable(value) else math.nan for value in values]


@chart_style()
def line_chart(
    title: str, lines: Sequence[Line], x_label: str, y_label: str, digits: int = 2, include: Sequence[float] = ()
) -> str:
    """Draws lines over one another. The y axis contains the values ``include``."""
    names = [shorten(clean(line.name), 60) for line in lines]
    legend = names if len(names) > 1 or names[0] not in y_label else []
    axes = _axes(HEIGHT, legend=legend)
    for line, name in zip(lines, names, strict=True):
        x, shade = _floats(line.x), color(line.color)
        if len(line.low):
            axes.fill_between(x, _floats(line.low), _floats(line.high), color=shade, alpha=0.18, linewidth=0)
        marker = MARKERS[line.color % len(MARKERS)] if line.color >= 0 and len(x) <= MAX_MARKED else ""
        style = "--" if line.reference else "-"
        axes.plot(x, _floats(line.y), style, color=shade, marker=marker, markersize=3.5, linewidth=1.6, label=name)
    for value in include:
        axes.axhline(value, color="#aaaaaa", linewidth=0.8, zorder=0.5)
    axes.margins(x=0.02)
    _label(axes, x_label, y_label, integer=True)
    ends = "; ".join(f"{line.name} ends at {number(line.points()[-1][1], digits)}" for line in lines if line.points())
    return _svg(axes, title, ends, legend)


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
    cells = [[number(column[x], digits) if x in column else "" for column in values] for x in places[::step]]
    rows = [[number(x, 0), *row] for x, row in zip(places[::step], cells, strict=True)]
    numbers = table([x_label, *(line.name for line in lines)], rows) + (
        note(f"Every {step}th row.") if step > 1 else ""
    )
    return figure(title, words, line_chart(title, lines, x_label, y_label, digits, include), numbers)


@chart_style()
def scatter_chart(title: str, groups: Sequence[Line], x_label: str, y_label: str) -> str:
    """Draws points. The x axis is logarithmic if all x are positive and the largest is more than 30 times the least."""
    xs = [x for group in groups for x, _ in group.points()]
    logarithmic = bool(xs) and min(xs) > 0 and max(xs) > 30 * min(xs)
    names = [shorten(clean(group.name), 60) for group in groups]
    axes = _axes(HEIGHT, legend=names)
    for group, name in zip(groups, names, strict=True):
        axes.plot(
            _floats(group.x),
            _floats(group.y),
            "D" if group.reference else MARKERS[group.color % len(MARKERS)],
            color=color(group.color),
            markersize=8 if group.reference else 4.5,
            markeredgecolor="white",
            markeredgewidth=1 if group.reference else 0,
            alpha=1 if group.reference else 0.6,
            zorder=3 if group.reference else 2,
            label=name,
        )
    if logarithmic:
        axes.set_xscale("log", subs=[])
    _label(axes, x_label, y_label, logarithmic=logarithmic)
    return _svg(axes, title, f"{sum(len(group.x) for group in groups)} points; each is a row of the table.", names)


@chart_style()
def interval_chart(title: str, rows: Sequence[IntervalRow], x_label: str, unit: str = "pp") -> str:
    """Draws one row per value in ``unit``, with a line at zero. An unbounded interval reaches the edge of the chart."""
    names = [shorten(clean(row.name), MAX_NAME) for row in rows]
    ends = [v for row in rows for v in (row.value, row.low, row.high, 0.0) if v is not None and drawable(v)]
    margin = (max(ends) - min(ends)) * 0.05 or 1.0
    low, high = min(ends) - margin, max(ends) + margin
    axes = _axes(0.24 * len(rows), left=0.3 + CHARACTER * 1.15 * max(map(len, names)))
    for place, row in enumerate(rows):
        if not drawable(row.value):
            axes.text(low, place, number(row.value), va="center", color=REFERENCE)
            continue
        axes.plot(row.value, place, "o", color=color(row.color), markersize=5)
        if row.low is not None and row.high is not None:
            edges = row.low if drawable(row.low) else low, row.high if drawable(row.high) else high
            axes.plot(edges, [place, place], color=color(row.color), linewidth=1.8)
    axes.axvline(0, color="#777777", linewidth=1)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(low, high))
    axes.set_yticks(range(len(rows)), names)
    axes.grid(visible=False, axis="y")
    _label(axes, x_label)
    return _svg(axes, title, "; ".join(f"{row.name}: {number(row.value, 2, unit, sign=True)}" for row in rows))


def total(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums the values of each name."""
    return {name: sum(p.get(name, 0.0) for p in parts) for name in dict.fromkeys(name for p in parts for name in p)}


def grouped(values: Sequence[dict[str, float]], max_bars: int = MAX_BARS) -> list[tuple[int, int, dict[str, float]]]:
    """Averages neighbouring bars until at most ``max_bars`` are left; returns (first, last, parts), counted from 1."""
    size = -(-len(values) // max_bars) or 1
    groups = [(first, values[first : first + size]) for first in range(0, len(values), size)]
    return [
        (first + 1, first + len(group), {name: seconds / len(group) for name, seconds in total(group).items()})
        for first, group in groups
    ]


@chart_style()
def stacked_bars(
    title: str, bars: Sequence[tuple[str, dict[str, float]]], order: Sequence[str], x_label: str, y_label: str
) -> str:
    """Draws a bar for each (name, parts), stacked in ``order``; the position in ``order`` selects the colour."""
    names = [shorten(clean(part), 60) for part in order]
    axes = _axes(HEIGHT, legend=names)
    level = [0.0] * len(bars)
    style: Any = {"width": 0.8 if len(bars) > 3 else 0.4, "edgecolor": "white", "linewidth": 0.4}
    for index, (part, label) in enumerate(zip(order, names, strict=True)):
        heights = [value if drawable(value := parts.get(part, 0.0)) else 0.0 for _, parts in bars]
        axes.bar(range(len(bars)), heights, bottom=level, color=color(index), label=label, **style)
        level = [below + height for below, height in zip(level, heights, strict=True)]
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.grid(visible=False, axis="x")
    _label(axes, x_label, y_label)
    step = -(-len(bars) // 10) or 1
    room = int((WIDTH - 1) / CHARACTER / max(1, len(bars) / step)) - 1
    axes.set_xticks(range(0, len(bars), step), [shorten(clean(name), room) for name, _ in bars[::step]])
    return _svg(axes, title, "; ".join(f"{name}: {number(sum(p.values()), 1)} s" for name, p in bars), names)


@chart_style()
def lanes_chart(title: str, lives: Sequence[Life], slots: Sequence[str], length: int) -> str:
    """Draws one lane per slot of each host, epochs from left to right; the colour of a bar is the stage of its seed."""
    lanes = {
        (life.env, slot): host * (len(slots) + HOST_GAP) + row
        for host, life in enumerate(lives)
        for row, slot in enumerate(slots)
    }
    names = [shorten(clean(slot if slot != slots[0] else f"host {env} {slot}"), 18) for env, slot in lanes]
    bars = [(s, lanes[life.env, s.slot]) for life in lives for s in life.stretches if s.slot in slots]
    stages = [stage for stage in STAGE_COLORS if any(s.stage == stage for s, _ in bars)]
    rollbacks = [(epoch, life) for life in lives for epoch in life.rollbacks if slots]
    legend = [*(stage.lower() for stage in stages), *(["rollback"] if rollbacks else [])]
    longest = max([length, 1, *(life.end for life in lives)])
    left = 0.25 + CHARACTER * 1.1 * max(map(len, names), default=0)
    inches_per_epoch = (LANES_WIDTH - left - 0.15) / longest
    bottom = max(lanes.values(), default=0) + 0.5
    axes = _axes(LANE * (bottom + 0.5), LANES_WIDTH, left, legend)
    axes.barh(list(lanes.values()), longest, height=0.86, color="#f4f4f4")
    draw_seeds(axes, bars, inches_per_epoch)
    for place, (epoch, life) in enumerate(rollbacks):
        ends = lanes[life.env, slots[0]] - 0.5, lanes[life.env, slots[-1]] + 0.5
        axes.plot([epoch, epoch], ends, "k:", linewidth=1.4, label=None if place else "rollback")
    axes.set_yticks(list(lanes.values()), names)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set(xlim=(0, longest), ylim=(bottom, -0.5))
    axes.grid(visible=False, axis="y")
    _label(axes, "epochs done", integer=True)
    return _svg(axes, title, "; ".join(life.words() for life in lives), legend)


def draw_seeds(axes: Axes, bars: Sequence[tuple[Stretch, float]], inches_per_epoch: float) -> None:
    """Draws the stretches of seeds, each in its lane, coloured by stage, with the name of each blueprint."""
    for stage in (*STAGE_COLORS, None):  # None: stages of another version of Esper
        own = [(s, lane) for s, lane in bars if (s.stage if s.stage in STAGE_COLORS else None) == stage]
        if own:
            axes.barh(
                [lane for _, lane in own],
                [max(s.end - s.begin, 0.02 / inches_per_epoch) for s, _ in own],
                left=[s.begin for s, _ in own],
                height=0.86,
                color=STAGE_COLORS[stage] if stage else "#888888",
                edgecolor="white",
                linewidth=0.5,
                label=stage.lower() if stage else None,
            )
    for name, begin, lane in _seed_names(bars, inches_per_epoch):
        axes.text(begin + 0.04 / inches_per_epoch, lane, name, va="center", fontsize=8.5, clip_on=True)


def _seed_names(bars: Sequence[tuple[Stretch, float]], inches_per_epoch: float) -> Iterator[tuple[str, int, float]]:
    """Yields (name, epoch, lane) of each seed, if its life is long enough for the name of its blueprint."""
    for place, (first, lane) in enumerate(bars):
        if first.cause != "germinate" or not first.blueprint:  # some seeds are kept at once
            continue
        end = first.end
        for later, other_lane in bars[place + 1 :]:
            if other_lane != lane or later.cause == "germinate" or later.stage == "PRUNED":
                break
            end = later.end
        room = int(((end - first.begin) * inches_per_epoch - 0.06) / CHARACTER)
        name = clean(first.blueprint)
        if room >= min(4, len(name)):
            yield shorten(name, room), first.begin, lane
