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
    all_rows = list(rows)
    if not all_rows:
        return ""
    attribute = f' class="{style}"' if style else ""
    parts = [f"<div class=scroll tabindex=0><table{attribute}>"]
    if caption:
        parts.append(f"<caption>{escape(caption)}</caption>")
    parts.append("<thead><tr>")
    parts += [f'<th scope="col">{escape(head)}</th>' for head in heads]
    parts.append("</tr></thead><tbody>")
    for row in all_rows[:MAX_ROWS]:
        parts.append(f'<tr><th scope="row">{escape(row[0])}</th>')
        parts += map(_cell, row[1:])
        parts.append("</tr>")
    parts.append("</tbody></table></div>")
    if len(all_rows) > MAX_ROWS:
        parts.append(note(f"The first {MAX_ROWS} of {len(all_rows):,} rows."))
    return "".join(parts)


def _cell(cell: object) -> str:
    words = escape(cell)
    if re.match(r"[+\-]?[\d.]", words):
        return f"<td class=n>{words}</td>"
    return f"<td>{words}</td>"


def figure(title: str, words: str, chart: str, numbers: str = "") -> str:
    """Returns a chart with its description and a collapsible table of its numbers."""
    details = ""
    if numbers:
        details = f"<details><summary>Numbers</summary>{numbers}</details>"
    caption = f"<figcaption><h3>{escape(title)}</h3><p>{escape(words, 1000)}</p></figcaption>"
    return f"<figure>{caption}{chart}{details}</figure>"


def section(name: str, title: str, *content: str) -> str:
    """Returns a section of the page that can be linked to."""
    return f'<section id="{escape(name)}"><h2>{escape(title)}</h2>{"".join(content)}</section>'


def figures(*content: str) -> str:
    """Arranges figures side by side if the screen is wide enough."""
    joined = "".join(content)
    if not joined:
        return ""
    return f"<div class=figures>{joined}</div>"


def heading(name: str, shown: bool) -> str:
    """Returns the heading of one run; "" unless ``shown``."""
    if not shown:
        return ""
    return f"<h3>{escape(name)}</h3>"


def note(words: str) -> str:
    return f"<p class=note>{escape(words, 2000)}</p>"
