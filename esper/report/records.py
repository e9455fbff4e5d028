"""Logged events as typed ones again, whoever wrote the log.

Nothing here trusts a log: fields are checked against the types that the event's class declares, and nothing in it is
imported or executed.
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

LARGEST = 2**53
"""Integers beyond it are no epochs, rounds or counts."""

Convert = Callable[[Any], Any]


class UnknownEvent(ValueError):
    """An event of a kind, or of a schema, that this Esper does not know."""


def event_of(fields: Any) -> Event:
    """The event that ``fields`` is the record of; fields that its class does not have are left out.

    Raises:
        UnknownEvent: it may be one, but of another Esper.
        ValueError: it is none, or a field is missing or of a wrong type.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        raise ValueError("not an event")
    name, schema = fields["event"], fields.get("schema")
    if isinstance(schema, int) and schema > SCHEMA_VERSION:
        raise UnknownEvent(f"event schema {schema}, this Esper reads up to {SCHEMA_VERSION}")
    kind = kinds().get(name)
    if kind is None:
        raise UnknownEvent(f"event {name[:40]!r}")
    return typing.cast(Event, build(kind, fields))


@functools.cache
def kinds() -> dict[str, type[Event]]:
    """All events by name."""
    return {kind.__name__: kind for kind in Event.__subclasses__() if kind.__module__ == events.__name__}


def build(kind: type[Any], fields: dict[str, Any]) -> Any:
    """A dataclass from a dict of its fields. Raises ValueError naming the field that is missing or of a wrong type."""
    values = {}
    for name, convert, needed in _fields(typing.cast(Hashable, kind)):
        if name in fields:
            try:
                values[name] = convert(fields[name])
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{kind.__name__}.{name} is {fields[name]!r:.40}") from None
        elif needed:
            raise ValueError(f"{kind.__name__} has no {name}")
    return kind(**values)


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Convert, bool]]:
    """Name, conversion, and whether it must be there, of each field."""
    hints = typing.get_type_hints(kind)
    nothing = dataclasses.MISSING
    return [
        (field.name, _conversion(hints[field.name]), field.default is nothing and field.default_factory is nothing)
        for field in dataclasses.fields(kind)
    ]


def _conversion(hint: Any) -> Convert:
    """How a value from JSON becomes one of this type; it raises TypeError or ValueError where it is none."""
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
        of_item = _conversion(arguments[1])
        return lambda value: {_str(key): of_item(item) for key, item in dict(value).items()}
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
        raise ValueError  # only what JSON has no number for is written as a string
    return number


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST:
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
