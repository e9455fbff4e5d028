"""Building blocks of the page: tables, figures with their numbers, sections. All text is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from esper.telemetry.text import MAX_LENGTH, clean

MAX_ROWS = 200


def escape(value: object, max_length: int = MAX_LENGTH) -> str:
    """Returns cleaned text for HTML, as text or in a quoted attribute."""
    return html.escape(clean(value, max_length), quote=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "", style: str = "") -> str:
    """Returns a table whose first column names the rows; cells are text, right-aligned if they are numbers.

    At most MAX_ROWS rows are shown; "" without rows.
    """
    everything = [list(row) for row in rows]
    if not everything:
        return ""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(_cell(cell) for cell in row[1:]) + "</tr>"
        for row in everything[:MAX_ROWS]
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    attribute = f' class="{style}"' if style else ""
    left_out = len(everything) > MAX_ROWS
    return (
        f"<div class=scroll tabindex=0><table{attribute}>{title}<thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
        + (note(f"The first {MAX_ROWS} of {len(everything):,} rows.") if left_out else "")
    )


def _cell(cell: object) -> str:
    words = escape(cell)
    attribute = " class=n" if re.match(r"[+\-]?[\d.]", words) else ""
    return f"<td{attribute}>{words}</td>"


def figure(title: str, words: str, chart: str, numbers: str = "") -> str:
    """Returns a chart with its description and a collapsible table of its numbers."""
    details = f"<details><summary>Numbers</summary>{numbers}</details>" if numbers else ""
    caption = f"<figcaption><h3>{escape(title)}</h3><p>{escape(words, 1000)}</p></figcaption>"
    return f"<figure>{caption}{chart}{details}</figure>"


def section(name: str, title: str, *content: str) -> str:
    """Returns a section of the page that can be linked to."""
    return f'<section id="{escape(name)}"><h2>{escape(title)}</h2>{"".join(content)}</section>'


def figures(*content: str) -> str:
    """Arranges figures side by side if the screen is wide enough."""
    return f"<div class=figures>{''.join(content)}</div>" if any(content) else ""


def heading(name: str, shown: bool) -> str:
    """Returns the heading of one run; "" unless ``shown``."""
    return f"<h3>{escape(name)}</h3>" if shown else ""


def note(words: str) -> str:
    return f"<p class=note>{escape(words, 2000)}</p>"
