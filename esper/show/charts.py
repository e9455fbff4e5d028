"""Charts of a report: lines with bands, points, intervals, stacked bars, and slots over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from esper.show.chart_style import MARKERS, PALETTE, REFERENCE, chart_style, inline_svg
from esper.show.html import figure, table
from esper.show.view import STAGE_COLORS
from esper.telemetry.seed_history import Life, Stretch
from esper.telemetry.text import clean, number, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.4
HEIGHT = 2.4
"""Size of a chart without its legend, in inches."""
LANES_WIDTH = 10.0
"""Width of a chart of slots, in inches."""
CHARACTER = 0.068
"""Approximate width of a character of a label, in inches."""
LANE = 0.19
"""Height of a lane in inches."""
HOST_GAP = 0.55
"""Gap between two hosts, in lanes."""
MAX_DRAWN = 1e30
"""Larger absolute values are not drawn: axes could overflow."""
MAX_NAME = 25
MAX_MARKED = 40
"""Max points of a line that have markers."""
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
        points = []
        for x, y in zip(self.x, self.y, strict=True):
            if drawable(x) and drawable(y):
                points.append((x, y))
        return points


def by_round(
    name: str,
    events: Sequence[Any],
    field: str,
    color: int,
    reference: bool = False,
    unit: float = 1.0,
) -> list[Line]:
    """Returns a line through that field of the events, divided by ``unit``, by round; empty if no event has a value."""
    points: dict[float, float] = {}
    for event in events:
        value = getattr(event, field)
        if value is not None:
            points[event.round] = value / unit
    if not points:
        return []
    return [Line(name, list(points), list(points.values()), color, reference=reference)]


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
    if index < 0:
        return REFERENCE
    return PALETTE[index % len(PALETTE)]


def _axes(height: float, width: float = WIDTH, legend: Sequence[str] = ()) -> Axes:
    """Returns axes about ``height`` inches high, with room above them for a legend with these names."""
    from matplotlib.figure import Figure  # slow to import

    rows = math.ceil(len(legend) / _legend_columns(legend, width))
    drawing = Figure(figsize=(width, height + 0.19 * rows + 0.6), layout="constrained")
    return drawing.add_subplot()


def _legend_columns(names: Sequence[str], width: float) -> int:
    longest = max(map(len, names), default=1)
    room = int(width / (CHARACTER * longest + 0.5))
    return max(1, min(len(names), room))


def _svg(axes: Axes, title: str, description: str, legend: Sequence[str] = ()) -> str:
    """Returns the chart, with a legend above the axes if ``legend`` has names."""
    drawing = cast("Figure", axes.figure)
    if legend:
        columns = _legend_columns(legend, drawing.get_figwidth())
        drawing.legend(loc="outside upper left", ncols=columns, borderaxespad=0.2, columnspacing=1.2)
    return inline_svg(drawing, clean(title), clean(description, 1000))


def _label(
    axes: Axes,
    x_label: str,
    y_label: str = "",
    integer: bool = False,
    logarithmic: bool = False,
) -> None:
    """Names the axes and sets round ticks with short labels; ``integer`` and ``logarithmic`` are about x."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    axes.set(xlabel=x_label, ylabel=y_label)
    formatter = FuncFormatter(lambda value, _: tick_label(value))
    steps = [1, 2, 5, 10]
    axes.xaxis.set_major_formatter(formatter)
    if logarithmic:
        axes.xaxis.set_major_locator(LogLocator(subs=[1, 3]))
    else:
        ticks = 6 if integer else 5
        axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=integer, steps=steps, min_n_ticks=1))
    if y_label:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=steps))
        axes.yaxis.set_major_formatter(formatter)


def tick_label(value: float) -> str:
    """Returns a short label: ``1e-06``, ``0.05``, ``1,200``, ``25k``, ``2.5M``."""
    size = abs(value)
    if size < 1000 or not size < 1e13:
        return f"{value:.6g}"
    if size < 1e4:
        return f"{value:,.0f}"
    if size < 1e6:
        return f"{value / 1e3:.6g}k"
    if size < 1e9:
        return f"{value / 1e6:.6g}M"
    return f"{value / 1e9:.6g}G"


def _floats(values: Sequence[float | None]) -> list[float]:
    """Replaces values that cannot be drawn by NaN, which leaves gaps."""
    return [math.nan if value is None or not drawable(value) else float(value) for value in values]


@chart_style()
def line_chart(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    digits: int = 2,
    include: Sequence[float] = (),
) -> str:
    """Draws lines over one another. The y axis contains the values ``include``."""
    names = [clean(line.name, 60) for line in lines]
    legend = names
    if len(names) == 1 and names[0] in y_label:
        legend = []
    axes = _axes(HEIGHT, legend=legend)
    ends = []
    for line in lines:
        draw_line(axes, line)
        points = line.points()
        if points:
            ends.append(f"{line.name} ends at {number(points[-1][1], digits)}")
    for value in include:
        axes.axhline(value, color="#aaaaaa", linewidth=0.8, zorder=0.5)
    axes.margins(x=0.02)
    _label(axes, x_label, y_label, integer=True)
    return _svg(axes, title, "; ".join(ends), legend)


def draw_line(axes: Axes, line: Line) -> None:
    """Draws a line with its band, named for a legend."""
    x = _floats(line.x)
    shade = color(line.color)
    if len(line.low):
        axes.fill_between(x, _floats(line.low), _floats(line.high), color=shade, alpha=0.18, linewidth=0)
    marker = ""
    if line.color >= 0 and len(x) <= MAX_MARKED:
        marker = MARKERS[line.color % len(MARKERS)]
    axes.plot(
        x,
        _floats(line.y),
        "--" if line.reference else "-",
        color=shade,
        marker=marker,
        markersize=3.5,
        linewidth=1.6,
        label=clean(line.name, 60),
    )


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
    heads = [x_label]
    columns = []
    places: set[float] = set()
    for line in lines:
        heads.append(line.name)
        columns.append(dict(zip(line.x, line.y, strict=True)))
        places.update(filter(drawable, line.x))
    rows = []
    for x in sorted(places):
        row = [number(x, 0)]
        for column in columns:
            text = ""
            if x in column:
                text = number(column[x], digits)
            row.append(text)
        rows.append(row)
    chart = line_chart(title, lines, x_label, y_label, digits, include)
    return figure(title, words, chart, table(heads, rows))


@chart_style()
def scatter_chart(title: str, groups: Sequence[Line], x_label: str, y_label: str) -> str:
    """Draws points. The x axis is logarithmic if all x are positive and the largest is more than 30 times the least."""
    names = [clean(group.name, 60) for group in groups]
    axes = _axes(HEIGHT, legend=names)
    drawn: list[float] = []
    points = 0
    for group, name in zip(groups, names, strict=True):
        points += len(group.x)
        for x, _ in group.points():
            drawn.append(x)
        style: dict[str, Any] = {"markersize": 4.5, "markeredgewidth": 0, "alpha": 0.6, "zorder": 2}
        marker = MARKERS[group.color % len(MARKERS)]
        if group.reference:
            style = {"markersize": 8, "markeredgewidth": 1, "alpha": 1, "zorder": 3}
            marker = "D"
        axes.plot(
            _floats(group.x),
            _floats(group.y),
            marker,
            color=color(group.color),
            markeredgecolor="white",
            label=name,
            **style,
        )
    logarithmic = bool(drawn) and min(drawn) > 0 and max(drawn) > 30 * min(drawn)
    if logarithmic:
        axes.set_xscale("log", subs=[])
    _label(axes, x_label, y_label, logarithmic=logarithmic)
    return _svg(axes, title, f"{points} points; each is a row of the table.", names)


@chart_style()
def interval_chart(title: str, rows: Sequence[IntervalRow], x_label: str, unit: str = "pp") -> str:
    """Draws one row per value in ``unit``, with a line at zero; an unbounded interval is left out."""
    names = [clean(row.name, MAX_NAME) for row in rows]
    axes = _axes(0.24 * len(rows))
    values = []
    for place, row in enumerate(rows):
        values.append(f"{row.name}: {number(row.value, 2, unit, sign=True)}")
        value, low, high = _floats([row.value, row.low, row.high])
        shade = color(row.color)
        axes.plot([value], [place], "o", color=shade, markersize=5)
        axes.plot([low, high], [place, place], color=shade, linewidth=1.8)
    axes.axvline(0, color="#777777", linewidth=1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), names)
    axes.grid(visible=False, axis="y")
    _label(axes, x_label)
    return _svg(axes, title, "; ".join(values))


@chart_style()
def lanes_chart(title: str, lives: Sequence[Life], slots: Sequence[str], length: int) -> str:
    """Draws one lane per slot of each host, epochs from left to right; the colour of a bar is the stage of its seed."""
    lanes: dict[tuple[int, str], float] = {}
    bars: list[tuple[Stretch, float]] = []
    rollbacks: list[tuple[int, int]] = []
    longest = max(length, 1)
    for host, life in enumerate(lives):
        top = host * (len(slots) + HOST_GAP)
        for row, slot in enumerate(slots):
            lanes[life.env, slot] = top + row
        bars += [(s, lanes[life.env, s.slot]) for s in life.stretches if s.slot in slots]
        if slots:
            rollbacks += [(life.env, epoch) for epoch in life.rollbacks]
        longest = max(longest, life.end)
    names = []
    for env, slot in lanes:
        name = f"host {env} {slot}" if slot == slots[0] else slot
        names.append(clean(name, 18))
    stages = {stretch.stage for stretch, _ in bars}
    legend = [stage.lower() for stage in STAGE_COLORS if stage in stages]
    if rollbacks:
        legend.append("rollback")
    left = CHARACTER * max(map(len, names), default=0)
    inches_per_epoch = (LANES_WIDTH - left - 0.4) / longest
    places = list(lanes.values())
    bottom = max(places, default=0) + 0.5
    axes = _axes(LANE * (bottom + 0.5), LANES_WIDTH, legend)
    draw_lanes(axes, dict(zip(places, names, strict=True)), bars, longest, inches_per_epoch)
    label: str | None = "rollback"
    for env, epoch in rollbacks:
        first = lanes[env, slots[0]] - 0.5
        last = lanes[env, slots[-1]] + 0.5
        axes.plot([epoch, epoch], [first, last], "k:", linewidth=1.4, label=label)
        label = None  # a legend names the first of them only
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_ylim(bottom, -0.5)
    _label(axes, "epochs done", integer=True)
    return _svg(axes, title, "; ".join(map(Life.words, lives)), legend)


def draw_lanes(
    axes: Axes,
    lanes: dict[float, str],
    bars: Sequence[tuple[Stretch, float]],
    longest: int,
    inches_per_epoch: float,
) -> None:
    """Draws the stretches of seeds, each in its lane, coloured by stage, with the name of each blueprint."""
    axes.barh(list(lanes), longest, height=0.86, color="#f4f4f4")
    axes.set_yticks(list(lanes), list(lanes.values()))
    axes.set_xlim(0, longest)
    axes.grid(visible=False, axis="y")
    shortest = 0.02 / inches_per_epoch  # a stretch within an epoch is still seen
    for stage, shade in STAGE_COLORS.items():
        places = []
        begins = []
        lengths = []
        for stretch, lane in bars:
            if stretch.stage == stage:
                places.append(lane)
                begins.append(stretch.begin)
                lengths.append(max(stretch.end - stretch.begin, shortest))
        if places:
            axes.barh(
                places,
                lengths,
                left=begins,
                height=0.86,
                color=shade,
                edgecolor="white",
                linewidth=0.5,
                label=stage.lower(),
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
