"""The events of a loop, and the seeds that they tell of, under the names of slots that users see."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from esper.core.action import Op
from esper.core.site import Site
from esper.hosts.find import Sites
from esper.telemetry.event import ActionTaken, Event, HostEvent
from esper.telemetry.seed_history import Life
from esper.training.metrics import HOST

if TYPE_CHECKING:
    from esper.grower.summary import GrowthSummary

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Event)


class LoopRecord:
    """Keeps the events of a step and the seeds of all steps.

    Args:
        slots: the slots of the model.
        sites: as users gave them.
        named: texts of the sites by slot.
    """

    def __init__(
        self,
        slots: Sequence[str],
        sites: Sites,
        named: Mapping[str, str],
    ) -> None:
        self.names: dict[str, str] = {}
        """Names for users, by slot: the keys of ``sites``, or its texts if it has no keys."""
        for slot in slots:
            self.names[slot] = named[slot]
            if isinstance(sites, Mapping) or named[slot] == HOST:  # events call the model so
                self.names[slot] = slot
        self.life = Life(0, 0)
        """The seeds so far; epochs are those of the loop."""
        self.scores: list[float] = []
        """Score after each decision, in the unit of ``evaluate``."""
        self.summary: GrowthSummary | None = None
        """Known at the end."""
        self._events: list[Event] = []
        self._refusals = {""}  # reasons that were said; that of a success is empty

    def note(self, event: Event, offset: int) -> Event:
        """Returns an event with names for users. The epochs of the loop are ``offset`` more than those of events."""
        event = renamed(event, self.names)
        if isinstance(event, ActionTaken) and event.op == Op.GERMINATE.name:
            if event.reason not in self._refusals:
                logger.warning("a seed was not planted: %s", event.reason)
            self._refusals.add(event.reason)
        if not (isinstance(event, ActionTaken) and event.op == Op.WAIT.name):  # a report has no WAIT as its action
            self._events.append(event)
        if isinstance(event, HostEvent):
            self.life.handle(replace(event, epoch=event.epoch + offset))
        return event

    @property
    def shown(self) -> str:
        """The names, for a text."""
        return ", ".join(self.names.values())

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        events = self._events
        self._events = []
        return events

    def kept(self, sites: Mapping[str, Site]) -> dict[str, str]:
        """Returns the blueprints of the seeds that are kept at ``sites``."""
        kept = {}
        for slot, site in sites.items():
            if site.fossil and site.planted is not None:
                kept[self.names[slot]] = site.planted.blueprint.name
        return kept

    def state_dict(self) -> str:
        """Returns the seeds as JSON."""
        return json.dumps({"life": self.life.state_dict(), "scores": self.scores})

    def load_state_dict(self, state: str) -> None:
        saved = json.loads(state)
        self.life.load_state_dict(saved["life"])
        self.scores = saved["scores"]


def renamed(event: E, names: Mapping[str, str]) -> E:
    """Returns an event with other names of slots."""
    values = {}
    for field in fields(event):
        values[field.name] = _renamed(getattr(event, field.name), names)
    return replace(event, **values)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, tuple):
        return tuple(_renamed(part, names) for part in value)
    if not isinstance(value, dict):
        return value
    found = {}
    for key, part in value.items():
        found[names.get(key, key)] = _renamed(part, names)
    return found
