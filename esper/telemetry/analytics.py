"""What became of the seeds of each blueprint, counted from the events of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from esper.telemetry.event import ActionTaken, EpisodeCompleted, EpochCompleted, Event, StageChanged

ALL = "all"
"""The name that the row of totals has."""


@dataclass(frozen=True, slots=True)
class BlueprintRow:
    """The seeds of one blueprint, or of all: ``germinated = fossilized + pruned + cut + rolled_back + living``."""

    blueprint: str
    germinated: int
    blended: int
    """Seeds that were ever blended into a host."""
    fossilized: int
    """Kept for good. One that a rollback took back is not among them."""
    pruned: int
    """Removed by the controller, or because they could not pass G2 in time."""
    cut: int
    """Removed because they became non-finite."""
    rolled_back: int
    """Removed by a rollback of their host, fossils too."""
    living: int
    """Neither kept nor removed: unfinished when their episode ended, or alive now."""
    rejected: int
    """Actions on them that were refused: by a gate, or because such a seed could not be built."""
    contribution_kept: float | None
    """Mean contribution when they were kept, pp; None where none was measured."""
    contribution_pruned: float | None
    """Mean contribution measured last before they were pruned, pp."""
    epochs_lived: float | None
    """Mean epochs from germination to removal, or to the end of the episode, or until now."""
    parameters: float | None
    """Mean parameters of those that were kept."""


@dataclass(slots=True)
class _Seed:
    """One that lives, or was kept in a host whose episode is not over."""

    blueprint: str
    born: int
    fossil: bool = False
    blended: bool = False
    contribution: float | None = None
    parameters: int | None = None


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self.total, self.count = self.total + value, self.count + 1

    def value(self) -> float | None:
        return self.total / self.count if self.count else None

    def merged(self, other: _Mean) -> _Mean:
        return _Mean(self.total + other.total, self.count + other.count)


@dataclass(slots=True)
class _Tally:
    """What is over for the seeds of one blueprint; those that live are counted from ``_Seed``."""

    germinated: int = 0
    blended: int = 0
    fossilized: int = 0
    pruned: int = 0
    cut: int = 0
    rolled_back: int = 0
    living: int = 0
    rejected: int = 0
    kept: _Mean = field(default_factory=_Mean)
    removed: _Mean = field(default_factory=_Mean)
    epochs: _Mean = field(default_factory=_Mean)
    parameters: _Mean = field(default_factory=_Mean)

    def merged(self, other: _Tally) -> _Tally:
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return _Tally(**counts, **{name: getattr(self, name).merged(getattr(other, name)) for name in _MEANS})

    def row(self, name: str) -> BlueprintRow:
        return BlueprintRow(
            name,
            **{count: getattr(self, count) for count in _COUNTS},
            contribution_kept=self.kept.value(),
            contribution_pruned=self.removed.value(),
            epochs_lived=self.epochs.value(),
            parameters=self.parameters.value(),
        )


_COUNTS = ("germinated", "blended", "fossilized", "pruned", "cut", "rolled_back", "living", "rejected")
_MEANS = ("kept", "removed", "epochs", "parameters")

Host = tuple[int, int]
"""Env and episode."""


class BlueprintAnalytics:
    """A sink: give it to a run as a callback, or feed it the events of a log in their order.

    Seeds that were planted before the first event it saw are left out. Simulated hosts have no such events.
    """

    def __init__(self) -> None:
        self._over: dict[str, _Tally] = defaultdict(_Tally)
        self._seeds: dict[Host, dict[str, _Seed]] = defaultdict(dict)
        self._epoch: dict[Host, int] = {}
        self._fossil_parameters: dict[Host, int] = {}

    def rows(self) -> list[BlueprintRow]:
        """A row for each blueprint that was planted or refused, the most planted first."""
        tallies = self._tallies()
        return [tally.row(name) for name, tally in sorted(tallies.items(), key=lambda i: (-i[1].germinated, i[0]))]

    def total(self) -> BlueprintRow:
        """All blueprints together, as ``ALL``."""
        total = _Tally()
        for tally in self._tallies().values():
            total = total.merged(tally)
        return total.row(ALL)

    def handle(self, event: Event) -> None:
        match event:
            case ActionTaken(accepted=False):
                self._refuse(event)
            case StageChanged():
                self._change(event)
            case EpochCompleted():
                self._measure(event)
            case EpisodeCompleted():
                self._end((event.env, event.episode), event.epochs)

    def close(self) -> None:
        """Nothing is pending."""

    def _refuse(self, event: ActionTaken) -> None:
        seed = self._seeds[event.env, event.episode].get(event.slot or "")
        name = event.blueprint or (seed.blueprint if seed else None)
        if name is not None:
            self._over[name].rejected += 1

    def _change(self, event: StageChanged) -> None:
        host = self._seeds[event.env, event.episode]
        if event.after == "GERMINATED" and event.blueprint is not None:
            host[event.slot] = _Seed(event.blueprint, event.epoch)
            self._over[event.blueprint].germinated += 1
            return
        seed = host.get(event.slot)
        if seed is None:
            return
        if event.after == "FOSSILIZED":
            seed.fossil = True
        elif event.after == "BLENDING":
            seed.blended = True
        elif event.after == "PRUNED":
            del host[event.slot]
            self._remove(seed, event)

    def _remove(self, seed: _Seed, event: StageChanged) -> None:
        tally = self._over[seed.blueprint]
        tally.blended += seed.blended
        tally.epochs.add(event.epoch - seed.born)
        if event.cause == "rollback":
            tally.rolled_back += 1
        elif event.cause == "not finite":
            tally.cut += 1
        else:
            tally.pruned += 1
            tally.removed.add(seed.contribution)

    def _measure(self, event: EpochCompleted) -> None:
        """Contributions of those that may still be kept or pruned, and the size of one that was kept in this epoch."""
        key = event.env, event.episode
        new = [seed for seed in self._seeds[key].values() if seed.fossil and seed.parameters is None]
        added = event.fossil_parameters - self._fossil_parameters.get(key, 0)
        if len(new) == 1 and added > 0:  # an env takes one action an epoch
            new[0].parameters = added
        self._fossil_parameters[key], self._epoch[key] = event.fossil_parameters, event.epoch
        for slot, seed in self._seeds[key].items():
            if not seed.fossil and slot in event.contributions:
                seed.contribution = event.contributions[slot]

    def _end(self, key: Host, epochs: int) -> None:
        for seed in self._seeds.pop(key, {}).values():
            _settle(self._over[seed.blueprint], seed, epochs)
        self._epoch.pop(key, None)
        self._fossil_parameters.pop(key, None)

    def _tallies(self) -> dict[str, _Tally]:
        """As if every episode ended now."""
        found = {name: tally.merged(_Tally()) for name, tally in self._over.items()}
        for key, host in self._seeds.items():
            for seed in host.values():
                _settle(found[seed.blueprint], seed, max(self._epoch.get(key, 0), seed.born))
        return found


def _settle(tally: _Tally, seed: _Seed, epochs: int) -> None:
    """Count a seed that is in its host when the episode has ``epochs`` epochs behind it."""
    tally.blended += seed.blended
    tally.epochs.add(epochs - seed.born)
    if seed.fossil:
        tally.fossilized += 1
        tally.kept.add(seed.contribution)
        tally.parameters.add(seed.parameters)
    else:
        tally.living += 1
