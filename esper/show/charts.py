"""Charts as SVG pictures: lines with bands, points, intervals, and slots over time."""

from __future__ import annotations

import io
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.show.view import STAGE_COLORS, RunView
from esper.telemetry.seed_history import Stretch
from esper.telemetry.text import clean, number, shorten, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933", "#44aa99", "#332288",
)  # fmt: skip
"""Okabe and Ito's colours without yellow and black, followed by four of Paul Tol's."""
MARKERS = "osD^vP*X<>"
INK = "#15191f"
REFERENCE = "#555f6e"
"""Colour of what runs are compared with."""
GRID = "#dfe3e8"
PAPER = "#ffffff"
LANE_COLOR = "#f1f3f5"
WIDTH = 4.0
HEIGHT = 2.4
"""Size of a chart without its legend, in inches."""
CHARACTER = 0.068
"""Approximate width of a character of a label, in inches."""
MAX_DRAWN = 1e30
"""Larger absolute values are not drawn: axes could overflow."""
MAX_NAME = 25
MAX_MARKED = 40
"""Max points of a line that have markers."""


@dataclass(frozen=True)
class Line:
    """A line, or points of one kind; ``low`` and ``high`` are its band. Values that cannot be drawn leave gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    """Index in the palette; -1 is the colour of references."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    reference: bool = False
    """Whether others are compared with it: a dashed line, or large diamonds above other points."""
    shared: bool = True
    """Whether the line is also drawn where several runs share the chart."""
    connected: bool = True
    """Whether points are joined. They are not if neighbours cannot be compared, as rounds on hosts that differ."""


@dataclass(frozen=True)
class Interval:
    """A value with its interval; ``low`` and ``high`` are None if the interval is unknown."""

    name: str
    value: float
    low: float | None
    high: float | None
    color: int = 0


@dataclass(frozen=True)
class Chart:
    """Lines over one another."""

    title: str
    words: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    digits: int = 2
    is_figure = True

    def numbers(self) -> list[list[str]]:
        """Returns a row of texts for each x: the x, and the y of each line."""
        columns = [dict(zip(line.x, line.y, strict=True)) for line in self.lines]
        rows = []
        for x in sorted(set().union(*columns)):
            row = [number(x, 0)]
            for column in columns:
                text = ""
                if x in column:
                    text = number(column[x], self.digits)
                row.append(text)
            rows.append(row)
        return rows


@dataclass(frozen=True)
class Intervals:
    """Values with their intervals."""

    title: str
    words: str
    rows: Sequence[Interval]
    label: str
    unit: str
    is_figure = True


@dataclass(frozen=True)
class SlotLanes:
    """The slots of the hosts of the newest round, as lanes over the epochs."""

    view: RunView
    title: str
    words: str = (
        "Each lane is a slot and each bar a seed, named after its blueprint, coloured by stage. Germinated: planted, "
        "not trained yet. Training: beside the host. Blending: its alpha is changing. Holding: blended, not kept yet. "
        "Fossilized: kept for good. Pruned: removed. Embargoed, resetting: not free again yet."
    )
    is_figure = True


@dataclass(frozen=True)
class Table:
    """Texts in rows, the first of each names its row; without rows, only its words are shown."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: str = ""
    is_figure = False


Block = Chart | Intervals | SlotLanes | Table


def note(words: str) -> Table:
    """Returns a line of text."""
    return Table("", (), (), words)


@contextmanager
def chart_style() -> Iterator[None]:
    """Applies the style to matplotlib figures made and saved inside the context, or in a decorated function.

    What the user has set for matplotlib, such as a style or a backend, neither changes the figures nor is changed.
    """
    matplotlib = _matplotlib()
    from cycler import cycler

    settings: Any = {
        "axes.prop_cycle": cycler(color=PALETTE),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": REFERENCE,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.labelsize": 9,
        "figure.facecolor": PAPER,
        "grid.color": GRID,
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "text.parse_math": False,  # names may contain dollar signs
        "svg.fonttype": "none",
        "svg.hashsalt": "esper",
    }
    settings |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # which leaves the backend
        matplotlib.rcParams.update(settings)
        yield


def _matplotlib() -> Any:
    """Imports matplotlib, also where MPLBACKEND names a backend that cannot be imported: figures are only saved."""
    imported = "matplotlib" in sys.modules
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib  # slow to import, and only charts need it
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend and not imported:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend  # for the caller's own figures
    return matplotlib


class Picture(NamedTuple):
    """A chart, and its description for readers who cannot see it."""

    svg: bytes
    words: str


def picture(
    figure: Figure,
    title: str,
    words: str,
    paper: str = "none",
) -> Picture:
    """Returns the figure as a picture on ``paper``, the same bytes for the same figure."""
    file = io.BytesIO()
    metadata = {"Title": clean(title), "Date": None, "Creator": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names may contain characters that the font lacks; browsers have others
        figure.savefig(
            file,
            format="svg",
            metadata=metadata,
            facecolor=paper,
        )
    return Picture(file.getvalue(), clean(words, 1000))


def floats(values: Sequence[float | None]) -> NDArray[np.float64]:
    """Replaces values that cannot be drawn by NaN, which leaves gaps."""
    numbers = np.array(values, dtype=np.float64)
    return np.where(np.abs(numbers) < MAX_DRAWN, numbers, np.nan)


def color(index: int) -> str:
    """Returns a colour of the palette, from the start again after its end; -1 is the colour of references."""
    if index < 0:
        return REFERENCE
    return PALETTE[index % len(PALETTE)]


@chart_style()
def draw(
    title: str,
    words: str,
    height: float,
    legend: Sequence[str],
    fill: Callable[[Axes], None],
) -> Picture:
    """Returns a chart about ``height`` inches high, with room above it for a legend with these names.

    ``fill`` draws on its axes; ``words`` describe the chart to readers who cannot see it.
    """
    from matplotlib.figure import Figure  # slow to import

    longest = max(map(len, legend), default=1)
    room = int(WIDTH / (CHARACTER * longest + 0.5))
    columns = max(1, min(len(legend), room))
    rows = math.ceil(len(legend) / columns)
    drawing = Figure(figsize=(WIDTH, height + 0.19 * rows + 0.6), layout="constrained")
    fill(drawing.add_subplot())
    if legend:
        drawing.legend(
            loc="outside upper left",
            ncols=columns,
            borderaxespad=0.2,
            columnspacing=1.2,
        )
    return picture(drawing, title, words)


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
) -> Picture:
    """Draws lines over one another."""
    from matplotlib.ticker import MaxNLocator

    legend = [clean(line.name, 60) for line in lines]
    if len(legend) == 1 and legend[0] in y_label:
        legend = []
    ends = []
    for line in lines:
        y = floats(line.y)
        known = y[np.isfinite(y)]
        if len(known):
            ends.append(f"{line.name} ends at {number(float(known[-1]))}")

    def fill(axes: Axes) -> None:
        for line in lines:
            draw_line(axes, line)
        axes.margins(x=0.02)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))

    return draw(title, "; ".join(ends), HEIGHT, legend, fill)


def draw_line(axes: Axes, line: Line) -> None:
    """Draws a line with its band, named for a legend."""
    x = floats(line.x)
    shade = color(line.color)
    if len(line.low):
        axes.fill_between(
            x,
            floats(line.low),
            floats(line.high),
            color=shade,
            alpha=0.18,
            linewidth=0,
        )
    style = "--" if line.reference else "-"
    marker = ""
    if not line.connected:
        style = "none"
    if style == "none" or (line.color >= 0 and len(x) <= MAX_MARKED):
        marker = MARKERS[line.color % len(MARKERS)]
    axes.plot(
        x,
        floats(line.y),
        linestyle=style,
        color=shade,
        marker=marker,
        markersize=3.5,
        linewidth=1.6,
        label=clean(line.name, 60),
    )


def interval_chart(
    title: str,
    rows: Sequence[Interval],
    x_label: str,
    unit: str = "pp",
) -> Picture:
    """Draws one row per value in ``unit``, with a line at zero; an unbounded interval is left out."""

    def fill(axes: Axes) -> None:
        for place, row in enumerate(rows):
            value, low, high = floats([row.value, row.low, row.high])
            shade = color(row.color)
            axes.plot([value], [place], "o", color=shade, markersize=5)
            axes.plot(
                [low, high],
                [place, place],
                color=shade,
                linewidth=1.8,
            )
        axes.axvline(0, color=REFERENCE, linewidth=1)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), [clean(row.name, MAX_NAME) for row in rows])
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=x_label)

    words = [f"{row.name}: {number(row.value, 2, unit, sign=True)}" for row in rows]
    return draw(title, "; ".join(words), 0.24 * len(rows), (), fill)


def draw_lanes(
    axes: Axes,
    lanes: dict[float, str],
    bars: Sequence[tuple[Stretch, float]],
    longest: int,
    inches_per_epoch: float,
) -> None:
    """Draws the stretches of seeds, each in its lane, coloured by stage, with the name of each blueprint; merges, the
    widths of layers after them, and where units are taken out again."""
    axes.barh(list(lanes), longest, height=0.86, color=LANE_COLOR)
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
                edgecolor=PAPER,
                linewidth=0.5,
                label=stage.lower(),
            )
    for cause, marker, words in (("merged", "^", "merges"), ("shrink", "v", "shrinks")):
        marks = [(stretch.begin, lane) for stretch, lane in bars if stretch.cause == cause]
        if marks:
            begins_at, lanes_at = zip(*marks, strict=True)
            axes.plot(
                begins_at,
                lanes_at,
                marker,
                color=INK,
                markersize=4.5,
                label=words,
            )
    for name, begin, lane in (*_seed_names(bars, inches_per_epoch), *_widths(bars, inches_per_epoch)):
        axes.text(
            begin + 0.05 / inches_per_epoch,
            lane,
            name,
            va="center",
            fontsize=8.5,
            color="black",
            clip_on=True,
        )


def _widths(bars: Sequence[tuple[Stretch, float]], inches_per_epoch: float) -> Iterator[tuple[str, float, float]]:
    """Yields (width, epoch, lane) of the layers that seeds have become a part of, where there is room."""
    for stretch, lane in bars:
        if stretch.width is None:
            continue
        words = times(stretch.width)
        inches = (stretch.end - stretch.begin) * inches_per_epoch - 0.06
        if inches >= CHARACTER * len(words):
            beside_marker = 0.06 if stretch.cause == "merged" else 0.0
            yield words, stretch.begin + beside_marker / inches_per_epoch, lane


def _seed_names(bars: Sequence[tuple[Stretch, float]], inches_per_epoch: float) -> Iterator[tuple[str, int, float]]:
    """Yields (name, epoch, lane) of each seed, if its life is long enough for the name of its blueprint."""
    for place, (first, lane) in enumerate(bars):
        if first.cause != "germinate" or not first.blueprint:  # some seeds are kept at once
            continue
        end = first.end
        for later, other_lane in bars[place + 1 :]:
            if other_lane != lane or later.cause == "germinate" or later.stage in ("PRUNED", "MERGED"):
                break
            end = later.end
        inches = (end - first.begin) * inches_per_epoch - 0.06
        room = int(inches / CHARACTER)
        name = clean(first.blueprint)
        if room >= min(4, len(name)):
            yield shorten(name, room), first.begin, lane
