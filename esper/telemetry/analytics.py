"""Fate of the seeds of each blueprint, counted from a run's events."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from esper.telemetry.event import ActionTaken, EpisodeCompleted, EpochCompleted, Event, StageChanged
from esper.telemetry.sink import Sink

ALL = "all"
"""Name of the totals row."""
FATES = {"rollback": "rolled_back", "not finite": "cut"}
"""Fate of a seed by the cause of its removal; for any other cause, it is ``pruned``."""


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
    blueprint: str
    born: int
    """Epoch of germination."""
    end: int
    """Epoch of removal, or the newest epoch of its host."""
    fate: str = "living"
    """Name of the count in BlueprintRow."""
    blended: bool = False
    contribution: float | None = None
    """The newest one, or the one when the seed was kept."""
    parameters: int | None = None


class BlueprintAnalytics(Sink):
    """A sink: pass it to a run as a callback, or feed it the events of a log in order.

    Seeds planted before the first event that it receives are not counted. Simulated hosts do not emit these events.
    """

    def __init__(self) -> None:
        self._seeds: list[_Seed] = []
        self._rejected: Counter[str] = Counter()
        self._hosts: dict[tuple[int, int], dict[str, _Seed]] = defaultdict(dict)
        """Seeds in their hosts, by (env, episode) and slot."""
        self._fossil_parameters: Counter[tuple[int, int]] = Counter()

    def rows(self) -> list[BlueprintRow]:
        """Returns a row for each blueprint that was planted or refused, the most planted first."""
        groups: dict[str, list[_Seed]] = {name: [] for name in self._rejected}
        for seed in self._seeds:
            groups.setdefault(seed.blueprint, []).append(seed)
        rows = [_row(name, seeds, self._rejected[name]) for name, seeds in groups.items()]
        return sorted(rows, key=lambda row: (-row.germinated, row.blueprint))

    def total(self) -> BlueprintRow:
        """Returns the totals over all blueprints, named ``ALL``."""
        return _row(ALL, self._seeds, self._rejected.total())

    def handle(self, event: Event) -> None:
        match event:
            case ActionTaken(accepted=False):
                seed = self._hosts[event.env, event.episode].get(event.slot or "")
                name = event.blueprint or (seed.blueprint if seed else None)
                if name is not None:
                    self._rejected[name] += 1
            case StageChanged():
                self._change(event, self._hosts[event.env, event.episode])
            case EpochCompleted():
                self._measure(event)
            case EpisodeCompleted():
                for seed in self._hosts.pop((event.env, event.episode), {}).values():
                    seed.end = event.epochs
                self._fossil_parameters.pop((event.env, event.episode), None)

    def _change(self, event: StageChanged, host: dict[str, _Seed]) -> None:
        if event.after == "GERMINATED" and event.blueprint is not None:
            host[event.slot] = _Seed(event.blueprint, event.epoch, event.epoch)
            self._seeds.append(host[event.slot])
        elif (seed := host.get(event.slot)) is None:
            return
        elif event.after == "FOSSILIZED":
            seed.fate = "fossilized"
        elif event.after == "BLENDING":
            seed.blended = True
        elif event.after == "PRUNED":
            seed.fate, seed.end = FATES.get(event.cause, "pruned"), event.epoch
            del host[event.slot]

    def _measure(self, event: EpochCompleted) -> None:
        """Records contributions of seeds that are not fossils yet, and the size of a seed kept in this epoch."""
        key = event.env, event.episode
        seeds = self._hosts[key]
        new = [seed for seed in seeds.values() if seed.fate == "fossilized" and seed.parameters is None]
        added = event.fossil_parameters - self._fossil_parameters[key]
        if len(new) == 1 and added > 0:  # an env takes one action per epoch
            new[0].parameters = added
        self._fossil_parameters[key] = event.fossil_parameters
        for slot, seed in seeds.items():
            seed.end = max(seed.born, event.epoch)
            if seed.fate != "fossilized" and slot in event.contributions:
                seed.contribution = event.contributions[slot]


def _row(name: str, seeds: list[_Seed], rejected: int) -> BlueprintRow:
    fates = Counter(seed.fate for seed in seeds)
    return BlueprintRow(
        name,
        germinated=len(seeds),
        blended=sum(seed.blended for seed in seeds),
        **{fate: fates[fate] for fate in ("fossilized", "pruned", "cut", "rolled_back", "living")},
        rejected=rejected,
        contribution_kept=mean(seed.contribution for seed in seeds if seed.fate == "fossilized"),
        contribution_pruned=mean(seed.contribution for seed in seeds if seed.fate == "pruned"),
        epochs_lived=mean(seed.end - seed.born for seed in seeds),
        parameters=mean(seed.parameters for seed in seeds if seed.fate == "fossilized"),
    )


def mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the finite values; None if there is none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
