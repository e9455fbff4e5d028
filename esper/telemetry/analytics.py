"""Fate of the seeds of each blueprint, counted from a run's events."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from esper.telemetry.event import ActionTaken, EpisodeCompleted, EpochCompleted, Event, StageChanged

ALL = "all"
"""Name of the totals row."""


@dataclass(frozen=True, slots=True)
class BlueprintRow:
    """Counts of the seeds of one blueprint, or of all blueprints.

    ``germinated = fossilized + pruned + cut + rolled_back + living``.
    """

    blueprint: str
    germinated: int
    blended: int
    """Seeds that were ever blended into a host."""
    fossilized: int
    """Seeds kept for good, except those that a rollback removed."""
    pruned: int
    """Seeds removed by the controller, or because they did not pass G2 in time."""
    cut: int
    """Seeds removed because they became non-finite."""
    rolled_back: int
    """Seeds, including fossils, removed by a rollback of their host."""
    living: int
    """Seeds neither kept nor removed: unfinished at the end of their episode, or still alive."""
    rejected: int
    """Refused actions on these seeds: a gate was not passed, or such a seed could not be built."""
    contribution_kept: float | None
    """Mean contribution when they were kept, in pp; None if none was measured."""
    contribution_pruned: float | None
    """Mean of the last contributions measured before they were pruned, in pp."""
    epochs_lived: float | None
    """Mean epochs from germination to removal, to the end of the episode, or until now."""
    parameters: float | None
    """Mean number of parameters of the kept seeds."""


@dataclass(slots=True)
class _Seed:
    """A seed that is alive, or a fossil in a host whose episode is not over."""

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
    """Counts of one blueprint's seeds whose fate is known; living ones are counted from ``_Seed``."""

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
    """A sink: pass it to a run as a callback, or feed it the events of a log in order.

    Seeds planted before the first event that it receives are not counted. Simulated hosts do not emit these events.
    """

    def __init__(self) -> None:
        self._over: dict[str, _Tally] = defaultdict(_Tally)
        self._seeds: dict[Host, dict[str, _Seed]] = defaultdict(dict)
        self._epoch: dict[Host, int] = {}
        self._fossil_parameters: dict[Host, int] = {}

    def rows(self) -> list[BlueprintRow]:
        """Returns a row for each blueprint that was planted or refused, the most planted first."""
        tallies = self._tallies()
        return [tally.row(name) for name, tally in sorted(tallies.items(), key=lambda i: (-i[1].germinated, i[0]))]

    def total(self) -> BlueprintRow:
        """Returns the totals over all blueprints, named ``ALL``."""
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
        """Does nothing: no work is pending."""

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
        """Records contributions of seeds that are not fossils yet, and the size of a seed kept in this epoch."""
        key = event.env, event.episode
        new = [seed for seed in self._seeds[key].values() if seed.fossil and seed.parameters is None]
        added = event.fossil_parameters - self._fossil_parameters.get(key, 0)
        if len(new) == 1 and added > 0:  # an env takes one action per epoch
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
        """Returns the counts as if every episode ended now."""
        found = {name: tally.merged(_Tally()) for name, tally in self._over.items()}
        for key, host in self._seeds.items():
            for seed in host.values():
                _settle(found[seed.blueprint], seed, max(self._epoch.get(key, 0), seed.born))
        return found


def _settle(tally: _Tally, seed: _Seed, epochs: int) -> None:
    """Counts a seed that is still in its host when the episode ends after ``epochs`` epochs."""
    tally.blended += seed.blended
    tally.epochs.add(epochs - seed.born)
    if seed.fossil:
        tally.fossilized += 1
        tally.kept.add(seed.contribution)
        tally.parameters.add(seed.parameters)
    else:
        tally.living += 1
