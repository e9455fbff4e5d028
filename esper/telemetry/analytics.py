"""Fate of the seeds of each blueprint, counted from a run's events."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from esper.telemetry.event import EpisodeCompleted, Event, HostEvent
from esper.telemetry.seed_history import Life
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
    contribution_kept: float | None
    """Mean contribution when they were kept, in pp; None if none was measured."""
    contribution_pruned: float | None
    """Mean of the last contributions measured before they were pruned, in pp."""
    epochs_lived: float | None
    """Mean epochs from germination to removal, to the end of the episode, or until now."""
    parameters: float | None
    """Mean number of parameters of the kept seeds."""


class BlueprintAnalytics(Sink):
    """A sink: pass it to a run as a callback, or feed it the events of a log in order.

    Seeds planted before the first event that it receives are not counted. Simulated hosts do not emit these events.
    """

    def __init__(self) -> None:
        self._hosts: dict[tuple[int, int], Life] = {}
        """Hosts under way, by (env, episode). Of others, only sums are kept: a run may have any number of them."""
        self._ended: dict[str, Sums] = {}
        """Sums over the seeds of hosts whose episode has ended, by blueprint."""

    def rows(self) -> list[BlueprintRow]:
        """Returns a row for each blueprint that was planted or refused, the most planted first."""
        rows = [_row(name, sums) for name, sums in self._sums().items()]
        return sorted(rows, key=lambda row: (-row.germinated, row.blueprint))

    def total(self) -> BlueprintRow:
        """Returns the totals over all blueprints, named ``ALL``."""
        total: Sums = defaultdict(float)
        for sums in self._sums().values():
            _add(total, sums)
        return _row(ALL, total)

    def handle(self, event: Event) -> None:
        if isinstance(event, HostEvent):
            key = event.env, event.episode
            host = self._hosts.get(key) or self._hosts.setdefault(key, Life(event.episode, event.env))
            host.handle(event)
        elif isinstance(event, EpisodeCompleted) and (ended := self._hosts.pop((event.env, event.episode), None)):
            ended.end = event.epochs
            _count(ended, self._ended)

    def _sums(self) -> dict[str, Sums]:
        """Returns sums over all seeds, by blueprint."""
        sums = {name: own.copy() for name, own in self._ended.items()}
        for host in self._hosts.values():
            _count(host, sums)
        return sums


def _count(host: Life, sums: dict[str, Sums]) -> None:
    """Adds the seeds of a host to the sums of their blueprints."""
    for name, refused in host.refused.items():
        _add(sums.setdefault(name, defaultdict(float)), {"rejected": refused})
    for seed in host.seeds:
        fate = "fossilized" if seed.kept else "living" if seed.cause is None else FATES.get(seed.cause, "pruned")
        measured = {
            "contribution_kept": seed.contribution_kept if seed.kept else None,
            "contribution_pruned": seed.contribution if fate == "pruned" else None,
            "epochs_lived": (host.end if seed.cause is None else seed.until) - seed.planted,
            "parameters": seed.parameters if seed.kept else None,
        }
        known = {name: value for name, value in measured.items() if value is not None and math.isfinite(value)}
        own = sums.setdefault(seed.blueprint, defaultdict(float))
        _add(own, {"germinated": 1, "blended": seed.blended, fate: 1, "rejected": seed.refusals, **known})
        _add(own, {f"{name} known": 1 for name in known})


def _add(sums: Sums, others: Mapping[str, float]) -> None:
    for name, value in others.items():
        sums[name] += value


def _row(name: str, sums: Sums) -> BlueprintRow:
    counts = "germinated", "blended", "fossilized", "pruned", "cut", "rolled_back", "living", "rejected"
    means = "contribution_kept", "contribution_pruned", "epochs_lived", "parameters"
    return BlueprintRow(
        name,
        *(int(sums[count]) for count in counts),
        *(sums[mean] / sums[f"{mean} known"] if sums[f"{mean} known"] else None for mean in means),
    )
