"""Charts of intervals, one per row, and stacked bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from esper.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, Plot
from esper.report.svg import WIDTH, Frame, Ids, Scale, drawable, hint, picture, span, tag, text, tick_label
from esper.report.text import escape, number

ROW = 22
LETTER = 8.2
"""Approximate width of a letter, in SVG units."""
MAX_BARS = 50
LEAST = 1e-9
"""Min value at the top of the y axis, so that it has room for ticks."""


@dataclass(frozen=True)
class Interval:
    """A value with its interval; ``low`` and ``high`` are None if there is none."""

    name: str
    value: float
    low: float | None
    high: float | None
    colour: int = 0

    def words(self, unit: str) -> str:
        ends = f", {number(self.low)} to {number(self.high)}" if self.low is not None and self.high is not None else ""
        return f"{self.name}: {number(self.value, 2, unit, sign=True)}{ends}"


def interval_chart(ids: Ids, plot: Plot, rows: Sequence[Interval]) -> str:
    """Draws one row per value, with a line at zero."""
    top = 10
    bottom = top + ROW * max(1, len(rows))
    values = [v for row in rows for v in (row.value, row.low, row.high)]
    left = 16 + LETTER * min(25, max((len(row.name) for row in rows), default=0))
    scale = Scale(*span([*values, 0.0]), left, WIDTH - RIGHT - 8)
    ticks = scale.ticks(4)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else scale.high - scale.low
    body = []
    for value in ticks:
        at = scale(value)
        body.append(tag("line", x1=at, x2=at, y1=top - 4, y2=bottom, class_="zero" if value == 0 else "grid"))
        body.append(text(at, bottom + 16, tick_label(value, step), anchor="middle"))
    body.append(text((left + WIDTH - RIGHT) / 2, bottom + 34, plot.x_label, "label", "middle"))
    for place, row in enumerate(rows):
        at, style = top + ROW * (place + 0.5), f"c{row.colour}"
        name = row.name if len(row.name) <= 25 else row.name[:24] + "…"
        body.append(tag("text", hint(row.name), escape(name), x=left - 8, y=at + 4, text_anchor="end"))
        if not drawable(row.value):
            body.append(text(left, at + 4, number(row.value), "label"))
            continue
        marks = []
        if row.low is not None and row.high is not None:
            low, high = (v if drawable(v) else edge for v, edge in ((row.low, scale.low), (row.high, scale.high)))
            marks.append(tag("line", x1=scale(low), x2=scale(high), y1=at, y2=at, class_=f"whisker {style}"))
        marks.append(tag("circle", cx=scale(row.value), cy=at, r=4.5, class_=f"dot {style}"))
        body.append(tag("g", hint(row.words(plot.unit)), *marks))
    return picture(ids.new(), plot.title, plot.description, bottom + BOTTOM, body)


def grouped(values: Sequence[dict[str, float]], most: int = MAX_BARS) -> list[tuple[int, int, dict[str, float]]]:
    """Averages neighbouring bars until there are at most ``most``; returns (first, last, parts), counted from 1."""
    size = -(-len(values) // most) or 1
    found = []
    for first in range(0, len(values), size):
        group = values[first : first + size]
        names = {name for parts in group for name in parts}
        means = {name: sum(parts.get(name, 0.0) for parts in group) / len(group) for name in names}
        found.append((first + 1, first + len(group), means))
    return found


def stacked_bars(ids: Ids, plot: Plot, bars: Sequence[tuple[str, dict[str, float]]], order: Sequence[str]) -> str:
    """Draws a bar for each (name, parts), stacked in ``order``; the position in ``order`` selects the colour."""
    shown = [(name, {k: v for k, v in parts.items() if drawable(v) and v > 0}) for name, parts in bars]
    top = max((sum(parts.values()) for _, parts in shown), default=1.0)
    frame = Frame(
        Scale(0, max(1, len(shown)), LEFT, WIDTH - RIGHT),
        Scale(0, max(top * 1.05, LEAST), HEIGHT - BOTTOM, TOP),
        plot.x_label,
        plot.y_label,
        names=True,
    )
    body = frame.draw()
    wide = (WIDTH - RIGHT - LEFT) / max(1, len(shown))
    bar, every = min(wide * 0.8, 48), -(-len(shown) // 10)
    for place, (name, parts) in enumerate(shown):
        middle, level = LEFT + wide * (place + 0.5), 0.0
        if place % every == 0:
            body.append(
                text(middle, HEIGHT - BOTTOM + 18, name if len(name) < 12 else name[:11] + "…", anchor="middle")
            )
        for part in (p for p in order if p in parts):
            upper, lower = frame.y(level + parts[part]), frame.y(level)
            words = f"{name}, {part}: {number(parts[part], plot.digits, plot.unit)}"
            style = f"fill c{order.index(part) % 10}"
            body.append(
                tag("rect", hint(words), x=middle - bar / 2, y=upper, width=bar, height=lower - upper, class_=style)
            )
            level += parts[part]
    return picture(ids.new(), plot.title, plot.description, HEIGHT, body)
