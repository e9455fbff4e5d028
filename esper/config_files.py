"""Configs and schedules as text: reading and writing TOML, and values from the command line.

What others need of this they import from ``esper.config``.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says what would be right."""


def read_toml(path: Path, kind: str = "config file") -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError, calling it a ``kind``, when it is missing or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{kind} {path} does not exist") from None
    except RecursionError:
        raise ConfigError(f"{kind} {path} cannot be read as TOML: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # of the file, of its bytes, of TOML, of a number with too many digits
        raise ConfigError(f"{kind} {path} cannot be read as TOML: {error}") from None


def set_dotted(tables: dict[str, Any], assignment: str) -> None:
    """Write ``a.b=c`` into nested tables; the value is read as TOML, and as a plain string where it is not TOML."""
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"--set wants SECTION.NAME=VALUE, such as run.seed=3, not {assignment!r}")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    for key in keys[:-1]:
        tables = tables.setdefault(key, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"--set {assignment}: {key} is a value, not a section")
    tables[keys[-1]] = value


def toml_text(tables: dict[str, Any], prefix: str = "") -> str:
    """Tables of scalars, lists and tables as TOML. JSON's strings, numbers, booleans and lists are TOML's too."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    text = "\n".join(lines) + "\n" if lines else ""
    for key, value in tables.items():
        if isinstance(value, dict):
            name = f"{prefix}{key}"
            text += f"\n[{name}]\n" + toml_text(value, f"{name}.")
    return text


def _toml_value(value: Any) -> str:
    # TOML has no surrogate pairs, and wants DEL escaped where JSON does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
