"""Logged events become typed events; anything else is refused with its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.telemetry.event import EpochCompleted, Event
from esper.telemetry.record import record
from esper.telemetry.records import EVENT_CLASSES, event_of
from tests.telemetry.test_event import KINDS, sample


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_survives_the_log(kind: type[Event]) -> None:
    event = sample(kind)
    back = event_of(json.loads(json.dumps(record(event))))
    assert repr(back) == repr(event)  # as text: NaN is not equal to itself


def fields(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(record(sample(EpochCompleted)))), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": "3"},
        {"epoch": True},
        {"epoch": 1.5},
        {"epoch": 10**30},
        {"reward": "much"},
        {"reward": "3.0"},  # only what JSON cannot write as a number is a string
        {"reward": None},
        {"reward": 10**400},
        {"contributions": [1.0]},
        {"contributions": {"r0c0": "x"}},
        {"stages": {"r0c0": 3}},
    ],
)
def test_a_field_of_a_wrong_type_is_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"EpochCompleted.{name}"):
        event_of(fields(**changes))


def test_a_missing_field_is_named_unless_it_has_a_default() -> None:
    with pytest.raises(ValueError, match="EpochCompleted has no reward"):
        event_of({k: v for k, v in fields().items() if k != "reward"})
    older = event_of({k: v for k, v in fields().items() if k != "contribution_errors"})
    assert isinstance(older, EpochCompleted)
    assert older.contribution_errors == {}


def test_a_newer_log_is_distinguished_from_a_broken_one() -> None:
    with pytest.raises(ValueError, match="Novelty"):
        event_of(fields(event="Novelty"))
    with pytest.raises(ValueError, match="schema 99"):
        event_of(fields(schema=99))
    assert isinstance(
        event_of(fields(novelty=1)), EpochCompleted
    )  # a field more is no harm


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(EVENT_CLASSES)), st.data())
def test_anything_but_an_event_raises_value_error(
    name: str, data: st.DataObject
) -> None:
    names = list(json.loads(json.dumps(record(sample(EVENT_CLASSES[name])))))
    found = {
        **json.loads(json.dumps(record(sample(EVENT_CLASSES[name])))),
        data.draw(st.sampled_from(names)): data.draw(JSON),
    }
    try:
        event = event_of(found)
    except ValueError:
        return
    assert isinstance(event, Event)
