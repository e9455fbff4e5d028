"""Configs and schedules as text: reading and writing TOML, and values from the command line.

Other modules import its public names from ``esper.config``.
"""

from __future__ import annotations

import json
import os
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from esper.errors import ConfigError


def at_home(path: str | Path) -> Path:
    """Returns ``path`` with the home folder in the place of a leading tilde. Raises ConfigError if it is not known."""
    expanded = os.path.expanduser(path)
    if str(expanded).startswith("~"):
        raise ConfigError(f"{path}: there is no such home folder; give a path without ~")
    return Path(expanded)


def read_toml(path: Path, kind: str = "config file") -> dict[str, Any]:
    """Reads a TOML file. Raises ConfigError, which calls the file a ``kind``, if it is missing or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin files with a byte-order mark
    except FileNotFoundError:
        raise ConfigError(f"{kind} {path} does not exist") from None
    except RecursionError:
        raise ConfigError(f"{kind} {path} cannot be read as TOML: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # unreadable file, invalid UTF-8 or TOML, or a number with too many digits
        raise ConfigError(f"{kind} {path} cannot be read as TOML: {error}") from None


def set_dotted(tables: dict[str, Any], assignment: str) -> None:
    """Writes ``a.b=c`` into nested tables; the value is parsed as TOML, or taken as a string if it is not TOML.

    Raises ConfigError if the assignment has another form, or if a section in it is a value.
    """
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"--set needs SECTION.NAME=VALUE, such as run.seed=3, not {assignment!r}")
    value: Any = text.strip()
    with suppress(ValueError, RecursionError):
        parsed = tomllib.loads(f"value = {text}")
        if len(parsed) == 1:  # else the text has further lines
            value = parsed["value"]
    for key in keys[:-1]:
        tables = tables.setdefault(key, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"--set {assignment}: {key} is a value, not a section")
    tables[keys[-1]] = value


def toml_text(tables: dict[str, Any], prefix: str = "") -> str:
    """Writes nested tables of scalars and lists as TOML; JSON's strings, numbers, booleans and lists are valid TOML."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    text = "\n".join(lines) + "\n" if lines else ""
    for key, value in tables.items():
        if isinstance(value, dict):
            name = f"{prefix}{key}"
            text += f"\n[{name}]\n" + toml_text(value, f"{name}.")
    return text


def _toml_value(value: Any) -> str:
    # TOML has no surrogate pairs and, unlike JSON, requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
