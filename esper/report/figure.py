"""Building blocks of the page: figures with their legend and numbers, tables, sections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from esper.report.charts import Line
from esper.report.svg import drawable
from esper.report.text import escape, number

MAX_ROWS = 200


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "", style: str = "") -> str:
    """Returns a table whose first column names the rows; cells are text, right-aligned if they are numbers.

    At most MAX_ROWS rows are shown; "" without rows.
    """
    every = [list(row) for row in rows]
    if not every:
        return ""
    shown = every[:MAX_ROWS]
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(_cell(cell) for cell in row[1:]) + "</tr>"
        for row in shown
    )
    note = f"<p class=note>The first {MAX_ROWS} of {len(every):,} rows.</p>" if len(every) > len(shown) else ""
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = f' class="{style}"' if style else ""
    whole = f"<table{kind}>{named}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=scroll tabindex=0>{whole}</div>{note}"


def _cell(cell: object) -> str:
    words = escape(cell)
    kind = " class=n" if re.match(r"[+\-]?[\d.]", words) else ""
    return f"<td{kind}>{words}</td>"


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Returns a legend of (style, name) pairs with colour swatches."""
    items = "".join(f'<li><i class="key {escape(style)}"></i>{escape(name)}</li>' for style, name in names)
    return f"<ul class=legend>{items}</ul>" if items else ""


def lines_legend(lines: Sequence[Line]) -> str:
    return legend((line.style, line.name) for line in lines) if len(lines) > 1 else ""


def lines_table(x_label: str, lines: Sequence[Line], digits: int = 2, x_digits: int = 0) -> str:
    """Returns the values of all lines, by x; thinned if there are more than MAX_ROWS."""
    values = [dict(zip(line.x, line.y, strict=True)) for line in lines]
    places = sorted({x for found in values for x in found if drawable(x)})
    every = -(-len(places) // MAX_ROWS) or 1
    rows = [
        [number(x, x_digits), *(number(found[x], digits) if x in found else "" for found in values)]
        for x in places[::every]
    ]
    note = f"<p class=note>Every {every}th row.</p>" if every > 1 else ""
    return table([x_label, *(line.name for line in lines)], rows) + note


def figure(title: str, words: str, drawing: str, legend_: str = "", numbers: str = "") -> str:
    """Returns a chart with its description and a collapsible table of its numbers."""
    unfold = f"<details><summary>Numbers</summary>{numbers}</details>" if numbers else ""
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(words, 1000)}</p></figcaption>"
        f"{legend_}{drawing}{unfold}</figure>"
    )


def section(name: str, title: str, *content: str) -> str:
    """Returns a section of the page that can be linked to."""
    return f'<section id="{escape(name)}"><h2>{escape(title)}</h2>{"".join(content)}</section>'


def figures(*content: str) -> str:
    """Arranges figures side by side if there is room."""
    return f"<div class=figures>{''.join(content)}</div>" if any(content) else ""


def note(words: str) -> str:
    return f"<p class=note>{escape(words, 2000)}</p>"
