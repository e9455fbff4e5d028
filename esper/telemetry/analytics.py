"""Fate of the seeds of each blueprint, counted from a run's events."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from esper.telemetry.event import EpisodeCompleted, Event, HostEvent
from esper.telemetry.seed_history import Life, TriedSeed
from esper.telemetry.sink import Sink

ALL = "all"
"""Name of the totals row."""
FATES = {"rollback": "rolled_back", "not finite": "cut"}
"""Fate of a seed by the cause of its removal; for any other cause, it is ``pruned``."""
Sums = defaultdict[str, float]
"""Sums over seeds by column, and of the columns that are means also the number of values, ``NAME known``."""


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
    contribution_kept: float | None = None
    """Mean contribution when they were kept, in pp; None if none was measured."""
    contribution_pruned: float | None = None
    """Mean of the last contributions measured before they were pruned, in pp."""
    epochs_lived: float | None = None
    """Mean epochs from germination to removal, to the end of the episode, or until now."""
    parameters: float | None = None
    """Mean number of parameters of the kept seeds."""


class BlueprintAnalytics(Sink):
    """A sink: pass it to a run as a callback, or feed it the events of a log in order.

    Seeds planted before the first event that it receives are not counted. Simulated hosts do not emit these events.

    Args:
        keep_lives: whether to keep the life of a host whose episode has ended; a run may have any number of them.
    """

    def __init__(self, keep_lives: bool = False) -> None:
        self.keep_lives = keep_lives
        self.lives: dict[tuple[int, int], Life] = {}
        """By episode and env: of all hosts, or of those under way."""
        self._ended: dict[str, Sums] = {}
        """Sums over the seeds of hosts whose lives are not kept, by blueprint."""

    def rows(self) -> list[BlueprintRow]:
        """Returns a row for each blueprint that was planted or refused, the most planted first."""
        # Blueprints that were planted equally often are in the order of their names.
        rows = [_row(name, sums) for name, sums in self._sums().items()]
        return sorted(rows, key=lambda row: (-row.germinated, row.blueprint))

    def total(self) -> BlueprintRow:
        """Returns the totals over all blueprints, named ``ALL``."""
        total: Sums = defaultdict(float)
        for sums in self._sums().values():
            for name, value in sums.items():
                total[name] += value
        return _row(ALL, total)

    def handle(self, event: Event) -> None:
        if isinstance(event, HostEvent):
            key = event.episode, event.env
            if key not in self.lives:
                self.lives[key] = Life(event.episode, event.env)
            self.lives[key].handle(event)
        elif isinstance(event, EpisodeCompleted) and (event.episode, event.env) in self.lives:
            self.lives[event.episode, event.env].end = event.epochs
            if not self.keep_lives:
                _count(self.lives.pop((event.episode, event.env)), self._ended)

    def _sums(self) -> dict[str, Sums]:
        """Returns sums over all seeds, by blueprint."""
        sums = {name: ended.copy() for name, ended in self._ended.items()}
        for host in self.lives.values():
            _count(host, sums)
        return sums


def _count(host: Life, sums: dict[str, Sums]) -> None:
    """Adds the seeds of a host to the sums of their blueprints."""
    for name, refused in host.refused.items():
        sums.setdefault(name, defaultdict(float))["rejected"] += refused
    for seed in host.seeds:
        fate = _fate(seed)
        row = sums.setdefault(seed.blueprint, defaultdict(float))
        row["germinated"] += 1
        row["blended"] += seed.blended
        row["rejected"] += seed.refusals
        row[fate] += 1
        # A fossil lives on, too.
        end = host.end if seed.cause is None else seed.until
        _measure(row, "epochs_lived", end - seed.planted)
        if seed.kept:
            _measure(row, "contribution_kept", seed.contribution_kept)
            _measure(row, "parameters", seed.parameters)
        if fate == "pruned":
            _measure(row, "contribution_pruned", seed.contribution)


def _fate(seed: TriedSeed) -> str:
    if seed.kept:
        return "fossilized"
    if seed.cause is None:
        return "living"
    return FATES.get(seed.cause, "pruned")


def _measure(sums: Sums, name: str, value: float | None) -> None:
    """Adds a value to the sum for a mean, if it is known."""
    if value is not None and math.isfinite(value):
        sums[name] += value
        sums[f"{name} known"] += 1


def _row(name: str, sums: Sums) -> BlueprintRow:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(BlueprintRow)[1:]:
        known = sums[f"{field.name} known"]
        if field.type == "int":
            values[field.name] = int(sums[field.name])
        elif known:
            values[field.name] = sums[field.name] / known
    return BlueprintRow(name, **values)
