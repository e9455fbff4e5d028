"""Events as records of a log."""

from __future__ import annotations

import dataclasses
from typing import Any

from esper.telemetry.event import Event
from esper.telemetry.text import plain

SCHEMA_VERSION = 1


def record(event: Event) -> dict[str, Any]:
    """Returns the event for JSON: "event" (its name), "schema", and its fields; non-finite floats as strings."""
    return {
        "event": type(event).__name__,
        "schema": SCHEMA_VERSION,
        **plain(event),
    }


def stable_record(event: Event) -> dict[str, Any]:
    """Returns ``record`` without the volatile fields: equal for two runs of the same seed."""
    stable = record(event)
    for field in dataclasses.fields(event):
        if field.metadata.get("volatile"):
            del stable[field.name]
    return stable
