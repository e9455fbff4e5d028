"""The state of a run, folded from its events: console lines, the live view and the report read nothing else."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from esper.telemetry import event as events
from esper.telemetry.analytics import BlueprintAnalytics
from esper.telemetry.event import Event
from esper.telemetry.score import ACCURACY, ScoreUnit
from esper.telemetry.seed_history import Life

STAGE_COLORS = {
    "GERMINATED": "#f0e442",
    "TRAINING": "#56b4e9",
    "BLENDING": "#e69f00",
    "HOLDING": "#cc79a7",
    "FOSSILIZED": "#40b58f",
    "MERGED": "#c5e8da",
    "PRUNED": "#d55e00",
    "EMBARGOED": "#bbbbbb",
    "RESETTING": "#e2e2e2",
}
"""For colour-blind readers, all light enough for black text. Of a merged seed its slot is free."""
REST = "the rest"
"""Name of the time outside all phases: hosts left alone, testing, reporting of rounds."""
MAX_RECENT = 5
MAX_HISTORY = 500
"""Events of each class that views keep which are fed by a run at work."""

PHASES: dict[type[Event], str] = {
    events.RunStarted: "baseline",
    events.EpochCompleted: "rounds",
    events.RoundCompleted: "rounds",
    events.ArmPlayed: "comparison",
}
"""The phase of a run in which an event occurs; other events occur in any phase."""

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Compared:
    """The grown hosts of a round beside others, in pp; test accuracies if they were measured."""

    split: str
    score: ScoreUnit
    """Display format of both."""
    name: str
    """Name of ``other``."""
    grown: float
    other: float | None
    """None if the run has no hosts left alone."""


@dataclass
class RunView:
    """Folds the events of one run, in order, into its current state, as a sink or from the events of a log.

    Rounds are counted from 1, episodes from 0: the hosts of round ``n`` play episode ``n - 1``.
    """

    limit: int | None = None
    """Max events of each class that are kept; None keeps all, and the lives of all hosts."""
    clock: Callable[[], float] | None = None
    """Seconds from any starting point, for a run at work; None for a log, in which only rounds have durations."""
    rounds: int = 0
    """Planned number of rounds; 0 if unknown."""
    done: int = 0
    """Number of completed rounds."""
    log: dict[type[Event], deque[Any]] = field(default_factory=dict)
    """By class, in the order in which they were logged."""
    hosts: dict[int, events.EpochCompleted] = field(default_factory=dict)
    """The newest epoch of each host of the newest round, by env."""
    epochs: dict[int, list[events.EpochCompleted]] = field(default_factory=lambda: defaultdict(list))
    """All epochs of the newest round, by their number."""
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """The newest actions, rollbacks and cut seeds."""

    def __post_init__(self) -> None:
        self.blueprints = BlueprintAnalytics(keep_lives=self.limit is None)
        self.pace = Pace(self, self.clock or (lambda: 0.0))

    def handle(self, event: Event) -> None:
        self.log.setdefault(type(event), deque(maxlen=self.limit)).append(event)
        self.blueprints.handle(event)
        self.pace.handle(event)
        match event:
            case events.RunStarted():
                self.rounds = event.rounds
            case events.RunResumed() | events.RoundCompleted():
                self.rounds = event.rounds
                self.done = event.round
            case events.EpochCompleted():
                if event.episode != self.episode:
                    self.hosts.clear()
                    self.epochs.clear()
                self.hosts[event.env] = event
                self.epochs[event.epoch].append(event)
            case events.ActionTaken(op="WAIT"):
                pass  # in every epoch
            case events.ActionTaken() | events.GovernorRollback() | events.SeedCut():
                self.recent.append(event)

    def of(self, event: type[E]) -> list[E]:
        """Returns the events of that class, in the order in which they were logged."""
        return list(self.log.get(event, ()))

    def last(self, event: type[E]) -> E | None:
        """Returns the newest event of that class."""
        found = self.log.get(event)
        if not found:
            return None
        newest: E = found[-1]
        return newest

    @property
    def lives(self) -> dict[tuple[int, int], Life]:
        """The life of every host, by episode and env."""
        return self.blueprints.lives

    @property
    def score(self) -> ScoreUnit:
        """Display format of the score of hosts."""
        defined = self.last(events.ScoreDefined)
        if defined is None:
            return ACCURACY
        return ScoreUnit(
            defined.name,
            defined.unit,
            defined.unit,
            defined.points,
            defined.priced,
            defined.of_reward,
        )

    @property
    def hosts_differ(self) -> bool:
        """Whether each episode has a host of its own kind, so that scores of different episodes cannot be compared."""
        return self.last(events.ContextDrawn) is not None or self.score.priced

    @property
    def begun(self) -> events.RunStarted | events.RunResumed | None:
        """The start of the run, or, if this view did not see that, its last resumption."""
        return self.last(events.RunStarted) or self.last(events.RunResumed)

    @property
    def slots(self) -> list[str]:
        """Slots in the host's order, or sorted by name if the start of the run is not logged."""
        started = self.last(events.RunStarted)
        named: list[str] = []
        if started is not None:
            named += started.slots
        others = set()
        for change in self.of(events.StageChanged):
            if change.slot not in named:
                others.add(change.slot)
        return named + sorted(others)

    @property
    def own_loop(self) -> bool:
        """True if the host is trained by a loop outside Esper: it has no tier, and unlike simulated hosts it reports
        its epochs."""
        return self.begun is not None and self.begun.tier is None and bool(self.hosts)

    @property
    def has_baseline(self) -> bool:
        """Whether baseline accuracies are those of hosts left alone: in a loop outside Esper, they may be those of its
        own model as it is without its seeds, which leans on them and says nothing about growth."""
        if any(math.isnan(epoch.baseline_accuracy) for epoch in self.hosts.values()):
            return False
        return not self.own_loop or self.last(events.BaselineMeasured) is not None

    @property
    def episode(self) -> int:
        """The episode of ``hosts``; -1 before the first epoch."""
        if not self.hosts:
            return -1
        return next(iter(self.hosts.values())).episode

    @property
    def under_way(self) -> bool:
        """Whether the round of ``hosts`` is not completed."""
        return self.episode >= self.done

    @property
    def part_of_round(self) -> float:
        """The part of the current round that is done, 0 to 1."""
        if not self.under_way or self.begun is None:
            return 0.0
        # Hosts of one round may be at different epochs.
        epochs = sum(epoch.epoch for epoch in self.hosts.values())
        return min(1.0, epochs / max(1, self.begun.n_envs * self.begun.episode_length))

    def curve(self, name: str) -> list[float]:
        """Returns the mean of the field ``name`` over the newest round's hosts, by epoch.

        Hosts whose episode has ended count with their last epoch, so that the curve is of the same hosts throughout.
        """
        means = []
        for same in self.by_epoch():
            values = [getattr(epoch, name) for epoch in same]
            means.append(sum(values) / len(same))
        return means

    def by_epoch(self) -> list[list[events.EpochCompleted]]:
        """Returns the newest epoch of each host of the newest round when a host had done 1, 2, ... epochs."""
        reached: dict[int, events.EpochCompleted] = {}
        found = []
        for number in sorted(self.epochs):
            for epoch in self.epochs[number]:
                reached[epoch.env] = epoch
            found.append(list(reached.values()))
        return found

    def compared(self, event: events.RoundCompleted) -> Compared:
        """Returns the hosts of a round beside the same ones alone, or without a test beside the baseline's curve."""
        if event.test_accuracy is None or event.alone_test_accuracy is None:
            other = None
            if self.has_baseline and not math.isnan(event.baseline_accuracy):
                other = event.baseline_accuracy
            return Compared("validation", self.score.while_training, "baseline", event.committed_accuracy, other)
        return Compared("test", self.score, "alone", event.test_accuracy, event.alone_test_accuracy)

    def warnings(self) -> list[tuple[int, events.AnomalyDetected]]:
        """Returns how often each anomaly of learning occurred, by its kind and head, and its newest event."""
        found: dict[tuple[str, str | None], list[events.AnomalyDetected]] = defaultdict(list)
        for event in self.of(events.AnomalyDetected):
            found[event.kind, event.head].append(event)
        return [(len(same), same[-1]) for same in found.values()]


class Pace:
    """The current phase of a run, and the time that the rest of the phase takes at the pace so far."""

    def __init__(self, view: RunView, clock: Callable[[], float]) -> None:
        self.view = view
        self.clock = clock
        self.phase = ""
        """A name from ``PHASES``; "" before the first event."""
        self.started = clock()
        self._phase_began = self.started
        self._newest = self.started
        """Time of the newest event."""
        self._played: list[events.ArmPlayed] = []
        """Rounds of arms, of one training seed."""

    def handle(self, event: Event) -> None:
        phase = PHASES.get(type(event), self.phase)
        restarted = False
        if isinstance(event, events.ArmPlayed):
            # Another training seed plays its rounds from the first one.
            restarted = bool(self._played) and event.round < self._played[-1].round
            if restarted:
                self._played.clear()
            self._played.append(event)
        if phase != self.phase or restarted:
            self.phase = phase
            self._phase_began = self._newest
        self._newest = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start of this process."""
        return self.clock() - self.started

    def units(self) -> tuple[float, float, float]:
        """Returns the units of the phase that an earlier process has done, that are done, and that there are in all.

        A unit is a round, or a round of one arm. All are 0 while the number is unknown.
        """
        view = self.view
        match self.phase:
            case "rounds":
                return self._resumed(), view.done + view.part_of_round, view.rounds
            case "comparison":
                played = self._played
                newest = played[-1]
                # The number of arms is known after the first round.
                if newest.round > 1:
                    arms = set()
                    in_round = 0
                    for event in played:
                        arms.add(event.controller)
                        in_round += event.round == newest.round
                    earlier = (played[0].round - 1) * len(arms)
                    done = (newest.round - 1) * len(arms) + in_round
                    return earlier, done, newest.rounds * len(arms)
        return 0.0, 0.0, 0.0

    def _resumed(self) -> float:
        """Returns the rounds that an earlier process has done."""
        resumed = self.view.last(events.RunResumed)
        if resumed is None:
            return 0.0
        return resumed.round + resumed.epochs / max(1, resumed.episode_length)

    @property
    def part(self) -> float:
        """The part of the phase that is done, 0 to 1."""
        _, done, total = self.units()
        return min(1.0, done / max(1.0, total))

    def seconds_left(self) -> float | None:
        """Estimates the seconds until the phase ends; None before anything in the phase was measured."""
        earlier, done, total = self.units()
        left = max(0.0, total - done)
        if self.phase == "rounds":
            completed = self.view.of(events.RoundCompleted)
            seconds = [event.seconds for event in completed if math.isfinite(event.seconds)]
            if seconds:
                return left * sum(seconds) / len(seconds)
        passed = self._newest - self._phase_began
        if passed <= 0 or done <= earlier:
            return None
        return left * passed / (done - earlier)


def phase_seconds(event: events.RoundCompleted) -> dict[str, Any]:
    """Returns the seconds of a round by phase, including the rest; the sum is the duration of the round."""
    # A log may hold anything: only durations count.
    phases = {name: seconds for name, seconds in event.phase_seconds.items() if math.isfinite(seconds) and seconds > 0}
    rest = event.seconds - sum(phases.values())
    if math.isfinite(rest) and rest > 0:
        phases[REST] = rest
    return phases
