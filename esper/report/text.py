"""Text and numbers from outside, made safe to show and easy to read."""

from __future__ import annotations

import html
import math
import unicodedata
from typing import Any

LONGEST = 200
"""Characters of one name or value that are shown."""
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Categories of what is never drawn: control codes, those that turn the direction of text, halves of characters."""


def clean(value: object, longest: int = LONGEST) -> str:
    """``value`` as one line that no terminal or browser takes for a command; what cannot be drawn is shown as �."""
    text = str(value)
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    text = text.replace("\n", " ").replace("\t", " ")
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in UNSEEN else c for c in text)


def escape(value: object, longest: int = LONGEST) -> str:
    """``clean`` for HTML and SVG, as text or within a quoted attribute."""
    return html.escape(clean(value, longest), quote=True)


def number(value: float | None, digits: int = 2, unit: str = "", sign: bool = False) -> str:
    """``value`` with thousands separated; "not measured" for None, "not a number" and the infinite as such."""
    if value is None:
        return "not measured"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    if value and (abs(value) >= 1e9 or abs(value) < 0.5 * 10**-digits):
        text = f"{value:+.2e}" if sign else f"{value:.2e}"
    else:
        text = f"{value:+,.{digits}f}" if sign else f"{value:,.{digits}f}"
    return f"{text} {unit}" if unit else text


def finite(value: Any) -> bool:
    """Whether it is a number that can be drawn."""
    return value is not None and math.isfinite(value)
