"""Typed events from logged records, which are not trusted.

Fields are checked against the types that the event's class declares; nothing in a log is imported or executed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Hashable
from typing import Any

from esper.telemetry import event as events
from esper.telemetry.event import SCHEMA_VERSION, Event

MAX_INTEGER = 2**53
"""Max integer: epochs, rounds and counts are never larger."""

Convert = Callable[[Any], Any]


class UnknownEvent(ValueError):
    """An event of an unknown class or schema, probably from another version of Esper."""


def event_of(fields: Any) -> Event:
    """Returns the event whose record is ``fields``; fields that its class does not have are ignored.

    Raises:
        UnknownEvent: its class or schema is unknown.
        ValueError: it is not an event, or a field is missing or has the wrong type.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        raise ValueError("not an event")
    name, schema = fields["event"], fields.get("schema")
    if isinstance(schema, int) and schema > SCHEMA_VERSION:
        raise UnknownEvent(f"event schema {schema} (this version of Esper reads up to {SCHEMA_VERSION})")
    if name not in event_classes():
        raise UnknownEvent(f"event {name[:40]!r}")
    return typing.cast(Event, build(event_classes()[name], fields))


@functools.cache
def event_classes() -> dict[str, type[Event]]:
    """Returns all event classes by name."""
    return {cls.__name__: cls for cls in Event.__subclasses__() if cls.__module__ == events.__name__}


def build(cls: type[Any], fields: dict[str, Any]) -> Any:
    """Builds a dataclass from a dict. Raises ValueError naming the field that is missing or has the wrong type."""
    values = {}
    for name, convert, required in _fields(typing.cast(Hashable, cls)):
        if name in fields:
            try:
                values[name] = convert(fields[name])
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{cls.__name__}.{name} is {fields[name]!r:.40}") from None
        elif required:
            raise ValueError(f"{cls.__name__} has no {name}")
    return cls(**values)


@functools.cache
def _fields(cls: Any) -> list[tuple[str, Convert, bool]]:
    """Returns the name and conversion of each field, and whether it is required."""
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return [
        (field.name, _conversion(hints[field.name]), field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(cls)
    ]


def _conversion(hint: Any) -> Convert:
    """Returns the conversion from JSON to this type; it raises TypeError or ValueError for other values."""
    simple: dict[Any, Convert] = {float: _float, int: _int, str: _str, bool: _bool}
    if hint in simple:
        return simple[hint]
    if dataclasses.is_dataclass(hint):
        return lambda value: build(typing.cast(type[Any], hint), dict(value))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # X | None
        inner = _conversion(next(a for a in arguments if a is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is dict:
        convert = _conversion(arguments[1])
        return lambda value: {_str(key): convert(item) for key, item in dict(value).items()}
    if origin is tuple and arguments[-1] is Ellipsis:
        each = _conversion(arguments[0])
        return lambda value: tuple(each(item) for item in _list(value))
    if origin is tuple:
        parts = [_conversion(argument) for argument in arguments]
        return lambda value: tuple(part(item) for part, item in zip(parts, _list(value), strict=True))
    raise TypeError(f"events have no fields of type {hint}")


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    number = float(value)
    if isinstance(value, str) and math.isfinite(number):
        raise ValueError  # only non-finite numbers are written as strings
    return number


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INTEGER:
        raise TypeError
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value
