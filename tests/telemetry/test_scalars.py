"""Scalars of events."""

from __future__ import annotations

from esper.telemetry.event import Event, PracticeRound, RanksWaited
from esper.telemetry.sinks.scalars import KINDS, Scalars
from tests.telemetry.sample_events import ANOMALY, END, completed, updated


def test_unmeasured_fields_have_no_scalar() -> None:
    scalars = Scalars().of(completed(1, test_accuracy=None, alone_test_accuracy=None))
    assert "esper/committed_accuracy" in scalars
    assert not any("test_accuracy" in tag for tag in scalars)


def test_memory_has_a_scalar_for_each_kind_and_place() -> None:
    scalars = Scalars().of(
        completed(1, memory={"allocated/cuda:0": 1024, "resident/cpu": 5})
    )
    assert {
        tag: value for tag, value in scalars.items() if tag.startswith("memory/")
    } == {
        "memory/allocated/cuda:0": 1024.0,
        "memory/resident/cpu": 5.0,
    }


def test_every_wanted_event_has_scalars() -> None:
    waited = RanksWaited(1, 4.0, (0.0, 1.0))
    assert Scalars().of(waited) == {"ranks/waited_0": 0.0, "ranks/waited_1": 0.25}
    samples: list[Event] = [
        completed(1),
        waited,
        updated(),
        PracticeRound(1, 2, 0.5),
        ANOMALY,
        END,
    ]
    assert {type(event) for event in samples} == KINDS
    assert all(
        Scalars().of(event) for event in samples if not isinstance(event, PracticeRound)
    )
