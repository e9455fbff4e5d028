"""Events: their fields, and that their records survive JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from typing import Any, TypeVar

import pytest

from esper.telemetry import event as events
from esper.telemetry.event import (
    Comparison,
    EpochCompleted,
    Event,
    GateEvaluated,
    HostEvent,
    RoundCompleted,
    RunCompleted,
)
from esper.telemetry.record import SCHEMA_VERSION, record, stable_record

Kind = TypeVar("Kind", bound=Event)

KINDS = [
    kind
    for _, kind in inspect.getmembers(events, inspect.isclass)
    if issubclass(kind, Event)
    and kind not in (Event, HostEvent)
    and kind.__module__ == events.__name__
]

# One value for each annotation that events use: a new annotation needs a line here, and is JSON-checked by that.
SAMPLES: dict[str, Any] = {
    "int": 3,
    "float": 1.25,
    "str": "r0c1",
    "bool": True,
    "str | None": None,
    "int | None": 8,
    "float | None": None,
    "tuple[Comparison, ...]": (
        Comparison("none", 85.0, 82.5, 2.5, -math.inf, math.inf, 0.25, "inconclusive"),
    ),
    "tuple[str, ...]": ("r0c0", "r0c1"),
    "tuple[float, ...]": (0.5, math.nan),
    "tuple[tuple[str, bool, float | None, float | None], ...]": (
        ("age", True, 3.0, 2.0),
        ("gain", False, None, None),
    ),
    "dict[str, float]": {"r0c0": 1.5},
    "dict[str, dict[str, float]]": {"host": {"norm": 0.5}},
    "dict[str, tuple[float, float]]": {"r0c0": (1.5, 0.5)},
    "dict[str, dict[str, tuple[float, float, int]]]": {"r0c0": {"norm": (1.5, 0.5, 2)}},
    "dict[str, str]": {"r0c0": "conv_light"},
    "dict[str, int]": {"op": 3},
    "dict[str, tuple[str, ...]] | None": {"op": ("PRUNE", "ADVANCE")},
}


def sample(kind: type[Kind]) -> Kind:
    """An event of this kind, every field filled by its annotation."""
    return kind(
        **{field.name: SAMPLES[str(field.type)] for field in dataclasses.fields(kind)}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_record_survives_json_unchanged(kind: type[Event]) -> None:
    fields = record(sample(kind))
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert fields["event"] == kind.__name__
    assert fields["schema"] == SCHEMA_VERSION
    assert set(fields) == {
        "event",
        "schema",
        *(field.name for field in dataclasses.fields(kind)),
    }


def test_numbers_that_json_lacks_become_strings_at_every_depth() -> None:
    gate = GateEvaluated(
        0, 0, 1, "r0c0", "G1", False, 0.0, checks=(("loss", False, math.nan, 2.0),)
    )
    assert record(gate)["checks"] == [["loss", False, "nan", 2.0]]
    epoch = dataclasses.replace(
        sample(EpochCompleted), contributions={"r0c0": -math.inf}
    )
    assert record(epoch)["contributions"] == {"r0c0": "-inf"}
    (compared,) = record(sample(RunCompleted))["comparisons"]
    assert (compared["reference"], compared["low"], compared["high"]) == (
        "none",
        "-inf",
        "inf",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_stable_record_drops_the_volatile_fields_and_nothing_else(
    kind: type[Event],
) -> None:
    made = sample(kind)
    volatile = {
        field.name for field in dataclasses.fields(kind) if "volatile" in field.metadata
    }
    stable = stable_record(made)
    assert stable == {
        name: value for name, value in record(made).items() if name not in volatile
    }


def test_clock_times_are_volatile_and_measurements_are_not() -> None:
    fields = stable_record(sample(RoundCompleted))
    assert {"seconds", "images_per_second", "phase_seconds"}.isdisjoint(fields)
    assert {"committed_accuracy", "samples", "rollbacks"} <= set(fields)


@pytest.mark.finding("M22")
@pytest.mark.parametrize("kind", KINDS)
def test_events_of_an_env_name_it(kind: type[Event]) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    whole = (
        RoundCompleted,
        RunCompleted,
    )  # means over hosts
    if (
        names & {"slot", "epoch", "stages", "fossils", "total_reward"}
        and kind not in whole
    ):
        assert {"env", "episode"} <= names
