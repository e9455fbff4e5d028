"""Typed events from logged records, which are not trusted.

Fields are checked against the types that the event's class declares; nothing in a log is imported or executed.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Hashable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    Strict,
    StrictBool,
    ValidationError,
    create_model,
)

from esper.telemetry import event as events
from esper.telemetry.event import Event
from esper.telemetry.record import SCHEMA_VERSION

MAX_INTEGER = 2**53
"""Max integer: epochs, rounds and counts are never larger."""
NOT_FINITE = ("nan", "inf", "-inf")
"""Floats that JSON lacks are logged as these strings."""


def event_of(fields: Any) -> Event:
    """Returns the event whose record is ``fields``; fields that its class does not have are ignored.

    Raises:
        ValueError: it is not an event, its class or schema is unknown, or a field is missing or has the wrong type.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        raise ValueError("not an event")
    name = fields["event"]
    schema = fields.get("schema")
    if isinstance(schema, int) and schema > SCHEMA_VERSION:
        raise ValueError(f"event schema {schema} (this version of Esper reads up to {SCHEMA_VERSION})")
    if name not in EVENT_CLASSES:
        raise ValueError(f"event {name[:40]!r} is unknown to this version of Esper")
    return build(EVENT_CLASSES[name], fields)


EVENT_CLASSES: dict[str, type[Event]] = {
    name: cls
    for name, cls in vars(events).items()
    if isinstance(cls, type) and issubclass(cls, Event) and cls not in (Event, events.HostEvent)
}
"""All event classes by name."""
T = typing.TypeVar("T")


def build(cls: type[T], fields: dict[str, Any]) -> T:
    """Builds a dataclass from a dict. Raises ValueError naming the field that is missing or has the wrong type."""
    try:
        logged = _model(typing.cast(Hashable, cls)).model_validate(fields)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        if name not in fields:
            raise ValueError(f"{cls.__name__} has no {name}") from None
        raise ValueError(f"{cls.__name__}.{name} is {fields[name]!r:.40}") from None
    return cls(**{name: getattr(logged, name) for name in logged.model_fields_set})


@functools.cache
def _model(cls: Any) -> type[BaseModel]:
    """Returns a model that checks all fields of a dataclass; those with a default may be missing."""
    missing = dataclasses.MISSING
    hints = typing.get_type_hints(cls)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        # For pydantic, a field whose default is an ellipsis is required.
        required = field.default is missing and field.default_factory is missing
        fields[field.name] = (_logged(hints[field.name]), ... if required else None)
    return create_model(cls.__name__, **fields)


def _logged(hint: Any) -> Any:
    """Returns the type of a field as it is logged: strict, with a dict for a dataclass."""
    if hint is float:
        return Annotated[float, Strict(), BeforeValidator(_number)]
    if hint is int:
        return Annotated[int, Strict(), Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
    if hint is bool:
        return StrictBool
    if hasattr(hint, "__dataclass_fields__"):
        return Annotated[dict[str, Any], AfterValidator(functools.partial(build, hint))]
    arguments = tuple(map(_logged, typing.get_args(hint)))
    if isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, arguments)
    if not arguments:
        return hint
    return typing.get_origin(hint)[arguments]


def _number(value: Any) -> Any:
    if value in NOT_FINITE:
        return float(value)
    return value
