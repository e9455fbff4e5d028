"""A small SVG writer: tags, scales, axes. Colours are classes, so that the page's style sheet sets them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from esper.report.text import escape, number

WIDTH = 460
"""Default width of a chart in SVG units, slightly less than a pixel each on a phone, so that text stays legible."""
LARGEST = 1e100
"""Max absolute value that is drawn: differences of larger ones could overflow."""


def drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and abs(value) < LARGEST


def tag(name: str, *children: str, **attributes: object) -> str:
    """Returns an element; ``class_`` is class and ``stroke_width`` is stroke-width.

    Children are markup and are not escaped; attributes are escaped.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>" if children else f"<{name}{written}/>"


def _attribute(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return escape(value, 100_000)


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start", **more: object) -> str:
    return tag("text", escape(words), x=x, y=y, class_=class_ or None, text_anchor=anchor, **more)


def hint(words: str) -> str:
    """Returns a tooltip."""
    return tag("title", escape(words))


class Ids:
    """Generates element ids that are unique within a page."""

    def __init__(self) -> None:
        self._next = 0

    def new(self) -> str:
        self._next += 1
        return f"p{self._next}"


def picture(name: str, title: str, description: str, height: float, body: Iterable[str], width: float = WIDTH) -> str:
    """Returns an svg element of ``width`` × ``height`` with a title and a description for screen readers."""
    return tag(
        "svg",
        tag("title", escape(title), id=f"{name}t"),
        tag("desc", escape(description, 1000), id=f"{name}d"),
        *body,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        aria_labelledby=f"{name}t {name}d",
    )


@dataclass(frozen=True)
class Scale:
    """Maps values to positions in the chart."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._measure(self.low), self._measure(self.high)
        part = (self._measure(value) - low) / (high - low)
        return self.begin + part * (self.end - self.begin)

    def _measure(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def ticks(self, wanted: int = 5) -> list[float]:
        """Returns round values within the scale, about ``wanted`` of them."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            found = [m * 10.0**e for e in range(first, last + 1) for m in steps]
        else:
            step = _step((self.high - self.low) / wanted)
            first = math.ceil(self.low / step - 1e-9)
            found = [i * step for i in range(first, first + 4 * wanted)]
            return [v for v in found if self.low - 1e-6 * step <= v <= self.high + 1e-6 * step]
        return [v for v in found if self.low <= v <= self.high]


def _step(rough: float) -> float:
    """Returns ``rough`` rounded up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1, 2, 5) if m * power >= rough * 0.999), 10 * power)


def whole_ticks(scale: Scale) -> list[float]:
    """Returns integer ticks, for epochs and rounds."""
    return sorted({float(round(tick)) for tick in scale.ticks(6) if abs(tick - round(tick)) < 1e-6})


def span(values: Iterable[float | None], floor: float | None = None, pad: float = 0.06) -> tuple[float, float]:
    """Returns the smallest range that holds all drawable values, with a margin."""
    found = [float(v) for v in values if v is not None and drawable(v)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    margin = (high - low) * pad if high > low else abs(high) * 0.1 or 0.5
    low, high = widened(low - margin, high + margin)
    return (max(low, floor), high) if floor is not None and max(low, floor) < high else (low, high)


def widened(low: float, high: float) -> tuple[float, float]:
    """Widens a range enough for its ticks to differ."""
    least = max(abs(low), abs(high)) * 1e-6 + 1e-9
    return (low, high) if high - low >= least else (low - least, high + least)


def tick_label(value: float, step: float) -> str:
    """Returns the shortest label that still distinguishes neighbouring ticks."""
    if value and abs(value) >= 1e5:
        for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size <= abs(value) < size * 1e4:
                return f"{value / size:g}{letter}"
        return f"{value:.0e}"
    if 0 < step < 1e-3:
        return f"{value:.0e}" if value else "0"
    return number(value, max(0, math.ceil(-math.log10(step) - 1e-9)) if step < 1 else 0)


@dataclass(frozen=True)
class Frame:
    """Axes with a grid."""

    x: Scale
    y: Scale
    x_label: str
    y_label: str
    whole: bool = False
    """Whether x ticks are integers only."""
    names: bool = False
    """Whether the x axis has bar names instead of ticks."""

    def draw(self) -> list[str]:
        left, right, top, bottom = self.x.begin, self.x.end, self.y.end, self.y.begin
        ticks = self.y.ticks()
        step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(self.y.high - self.y.low)
        parts = []
        for value in ticks:
            at = self.y(value)
            parts.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="zero" if value == 0 else "grid"))
            parts.append(text(left - 6, at + 4, tick_label(value, step), anchor="end"))
        ticks = [] if self.names else whole_ticks(self.x) if self.whole else self.x.ticks()
        step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(self.x.high - self.x.low)
        for value in ticks:
            at = self.x(value)
            parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="tick"))
            parts.append(text(at, bottom + 18, tick_label(value, step), anchor="middle"))
        parts.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
        parts.append(text((left + right) / 2, bottom + 36, self.x_label, "label", "middle"))
        parts.append(text(2, top - 10, self.y_label, "label"))
        return parts
