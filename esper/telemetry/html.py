"""Small pieces of HTML with which public objects show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from esper.telemetry.text import clean


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table; cells are text, and numbers stand at the right."""
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    lines = [f"<tr>{head}</tr>"] if heads else []
    for row in rows:
        cells = ""
        for value in row:
            side = "left"
            words = str(value)
            if isinstance(value, int):
                side = "right"
                words = f"{value:,}"
            cells += f'<td style="text-align:{side}">{_text(words)}</td>'
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def lines(words: str) -> str:
    """Returns text whose lines stay lines."""
    return f"<pre>{escape(words)}</pre>"


def picture(svg: bytes) -> str:
    """Returns a chart as a part of the page, without the header of its file."""
    text = svg.decode()
    return f'<div style="max-width:46em">{text[text.index("<svg") :]}</div>'


def _text(value: object) -> str:
    return escape(clean(value))
