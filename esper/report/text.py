"""Untrusted text and numbers, made safe to display and easy to read."""

from __future__ import annotations

import html
import math
import unicodedata
from typing import Any

LONGEST = 200
"""Max characters shown of a name or value."""
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories that are never drawn.

They are control and format characters (including text direction marks), surrogates, private use, unassigned, and line
and paragraph separators.
"""


def clean(value: object, longest: int = LONGEST) -> str:
    """Returns ``value`` as one line without control codes of terminals or browsers; undrawable characters become �."""
    text = str(value)
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    text = text.replace("\n", " ").replace("\t", " ")
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in UNSEEN else c for c in text)


def escape(value: object, longest: int = LONGEST) -> str:
    """Returns ``clean`` text escaped for HTML and SVG, as text or in a quoted attribute."""
    return html.escape(clean(value, longest), quote=True)


def number(value: float | None, digits: int = 2, unit: str = "", sign: bool = False) -> str:
    """Formats ``value`` with thousands separators; None, NaN and infinities become words."""
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
    """Whether ``value`` is a finite number."""
    return value is not None and math.isfinite(value)
