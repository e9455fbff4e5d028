"""Line charts with bands, and scatter charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from esper.report.svg import WIDTH, Frame, Ids, Scale, drawable, hint, picture, span, tag, widened
from esper.report.text import number

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 270, 52, 10, 28, 44
MAX_HINTS = 150
"""Max points of a line that have their own hints."""


@dataclass(frozen=True)
class Line:
    """One line; ``low`` and ``high`` are its band. Values that cannot be drawn leave gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int
    """Index in the palette; -1 is the muted colour of references."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False

    @property
    def style(self) -> str:
        return f"c{self.colour if self.colour >= 0 else 'b'}" + (" dash" if self.dashed else "")

    def rows(self) -> list[tuple[float, float]]:
        """Returns the (x, y) points that can be drawn."""
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if drawable(x) and drawable(y)]


@dataclass(frozen=True)
class Plot:
    """Title, description and axes of a chart."""

    title: str
    description: str
    x_label: str
    y_label: str
    unit: str = ""
    digits: int = 2
    zero: bool = False
    """Whether the y axis always includes zero."""
    whole: bool = True
    """Whether x values are integers."""
    limits: list[float] = field(default_factory=list)
    """Values of y that the axis must include."""


def line_chart(ids: Ids, plot: Plot, lines: Sequence[Line]) -> str:
    """Draws lines over one another; hovering over a point shows its values."""
    xs = [x for line in lines for x, _ in line.rows()]
    ys = [value for line in lines for value in (*line.y, *line.low, *line.high)]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    bounds = span([*ys, *plot.limits, *([0.0] if plot.zero else [])])
    frame = Frame(
        Scale(*widened(low, high), LEFT, WIDTH - RIGHT),
        Scale(*bounds, HEIGHT - BOTTOM, TOP),
        plot.x_label,
        plot.y_label,
        plot.whole,
    )
    body = frame.draw()
    body += [_band(frame, line) for line in lines if len(line.low)]
    for line in lines:
        body += _line(frame, plot, line)
    return picture(ids.new(), plot.title, plot.description, HEIGHT, body)


def _band(frame: Frame, line: Line) -> str:
    """Draws the area between ``low`` and ``high``, in one piece per stretch without gaps."""
    there = [
        (x, low, high) if all(map(drawable, (x, low, high))) else None
        for x, low, high in zip(line.x, line.low, line.high, strict=True)
    ]
    pieces, piece = [], []
    for point in [*there, None]:
        if point is not None:
            piece.append(point)
            continue
        if len(piece) > 1:
            there_and_back = [(x, high) for x, _, high in piece] + [(x, low) for x, low, _ in reversed(piece)]
            pieces.append("M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in there_and_back) + "Z")
        elif piece:
            x, low, high = piece[0]
            pieces.append(
                f"M{frame.x(x) - 3:.1f} {frame.y(high):.1f}h6V{frame.y(low):.1f}h-6Z"  # one point has no width
            )
        piece = []
    return tag("path", d="".join(pieces), class_=f"band {line.style.split()[0]}") if pieces else ""


def _line(frame: Frame, plot: Plot, line: Line) -> list[str]:
    path, pen_down = [], False
    for x, y in zip(line.x, line.y, strict=True):
        if drawable(x) and drawable(y):
            path.append(f"{'L' if pen_down else 'M'}{frame.x(x):.1f} {frame.y(y):.1f}")
            pen_down = True
        else:
            pen_down = False
    points = line.rows()
    parts = [tag("path", d="".join(path), class_=f"line {line.style}")] if path else []
    if len(points) > MAX_HINTS:
        return parts
    for x, y in points:
        words = f"{line.name}, {plot.x_label} {number(x, 0 if plot.whole else 2)}: {number(y, plot.digits, plot.unit)}"
        mark = "dot" if len(points) <= 3 and not line.dashed else "spot"
        parts.append(
            tag("circle", hint(words), cx=frame.x(x), cy=frame.y(y), r=4, class_=f"{mark} {line.style.split()[0]}")
        )
    return parts


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    colour: int
    words: str
    large: bool = False


def scatter_chart(ids: Ids, plot: Plot, points: Sequence[Point]) -> str:
    """Draws points, each with its words as a hint.

    The x axis is logarithmic if all x are positive and the largest is more than 30 times the smallest.
    """
    shown = [p for p in points if drawable(p.x) and drawable(p.y)]
    xs = [p.x for p in shown]
    logarithmic = bool(xs) and min(xs) > 0 and max(xs) > 30 * min(xs)
    low, high = (
        (min(xs) / 1.3, max(xs) * 1.3) if logarithmic else span(xs, floor=0.0 if min(xs, default=0) >= 0 else None)
    )
    frame = Frame(
        Scale(low, high, LEFT, WIDTH - RIGHT, logarithmic),
        Scale(*span(p.y for p in shown), HEIGHT - BOTTOM, TOP),
        plot.x_label,
        plot.y_label,
    )
    body = frame.draw()
    for point in sorted(shown, key=lambda p: p.large):  # references are drawn on top
        style = f"c{point.colour if point.colour >= 0 else 'b'}"
        at = {"x": frame.x(point.x), "y": frame.y(point.y)}
        if point.large:
            shape = f"M{at['x']:.1f} {at['y'] - 8:.1f}l8 8l-8 8l-8 -8Z"
            body.append(tag("path", hint(point.words), d=shape, class_=f"diamond {style}"))
        else:
            body.append(tag("circle", hint(point.words), cx=at["x"], cy=at["y"], r=4, class_=f"point {style}"))
    return picture(ids.new(), plot.title, plot.description, HEIGHT, body)
