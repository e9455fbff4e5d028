"""Text and numbers of a run, made safe to display and easy to read."""

from __future__ import annotations

import io
import math
import os
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from esper.agents.spec import ControllerSpec

MAX_LENGTH = 200
"""Max characters shown of a name or value."""
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories that are never shown.

They are control and format characters (including text direction marks), surrogates, private use, unassigned, and line
and paragraph separators.
"""


def clean(value: object, max_length: int = MAX_LENGTH) -> str:
    """Returns ``value`` as one line without control codes of terminals or browsers; hidden characters become �."""
    text = shorten(str(value), max_length)
    if text.isascii() and text.isprintable():
        return text
    # These two separate words; other control characters are only marked.
    text = text.replace("\n", " ").replace("\t", " ")
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in HIDDEN else c for c in text)


def shorten(text: str, max_length: int) -> str:
    """Cuts ``text`` to ``max_length`` characters; a cut text ends with an ellipsis."""
    if len(text) <= max_length:
        return text
    return text[: max_length - 1] + "…"


def number(value: float | None, digits: int = 2, unit: str = "", sign: bool = False) -> str:
    """Formats ``value`` with thousands separators; None, NaN and infinities become words."""
    if value is None:
        return "not measured"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    form = f",.{digits}f"
    # Zero has no exponent; other values must not be shown as zero.
    if value and (abs(value) >= 1e9 or abs(value) < 0.5 * 10**-digits):
        form = ".2e"
    if sign:
        form = f"+{form}"
    return with_unit(f"{value:{form}}", unit)


def p_value(value: float, equals: str = "") -> str:
    """Formats a p-value with four decimals, behind ``equals``; ``< 0.0001`` if that would be 0, ``1`` for 1, and a dash
    for a p that is withheld, NaN."""
    if math.isnan(value):
        return "-"
    if value < 1e-4:
        return "< 0.0001"
    if value == 1.0:
        return f"{equals}1"
    return f"{equals}{number(value, 4)}"


def with_unit(text: str, unit: str) -> str:
    """``1.5 pp``; without a unit the number alone."""
    return f"{text} {unit}" if unit else text


def labelled(words: str, unit: str) -> str:
    """``accuracy, %``, for an axis or a column; without a unit the words alone."""
    return f"{words}, {unit}" if unit else words


def count(amount: int, noun: str) -> str:
    """``1 round``, ``2 rounds``."""
    if amount != 1:
        noun += "s"
    return f"{amount} {noun}"


def times(ratio: float) -> str:
    """Returns a ratio as a factor, such as ×1.5."""
    return f"×{ratio:.3g}"


def trained_once(controllers: Sequence[str], names: Sequence[str] | None = None) -> list[str]:
    """Returns the sentence on the intervals of trained agents among ``controllers``, shown by ``names``; [] if none is.

    An agent that was trained once says nothing about how much others would differ that are trained as it was.
    """
    shown = []
    for controller, name in zip(controllers, names or controllers, strict=True):
        if ControllerSpec.of(controller).is_trained:
            shown.append(name)
    if not shown:
        return []
    return [f"{', '.join(shown)}: trained once, so the intervals leave out the spread of training."]


def duration(seconds: float) -> str:
    """Formats whole seconds as ``45s``, ``2m05s`` or ``1h02m``."""
    if not 0 <= seconds < 1e9:
        return number(seconds, 0, "s")
    # Rounded first, so that 59.9 seconds are 1m00s.
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest}s"
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def plain(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON lacks, by strings, so that every parser can read the log.

    A dataclass becomes a dict of its fields.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def on_terminal() -> bool:
    """Whether standard output is a terminal; an object that a program has put in its place may not know."""
    known = getattr(sys.stdout, "isatty", None)
    return known is not None and bool(known())


def print_anywhere() -> None:
    """Makes this process print a question mark where the encoding of a terminal or a pipe lacks a character.

    A standard stream that the caller has closed reads and writes nothing; else the first file that is opened would take
    its place, and get what libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
