"""The state of a run so far, as shown by the console, the live view, `esper show` and the report."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TypeVar, cast

from esper.telemetry import event as events
from esper.telemetry.analytics import BlueprintAnalytics
from esper.telemetry.event import Event
from esper.telemetry.score import ACCURACY, ScoreUnit

REST = "the rest"
"""Name of the time outside all phases: hosts left alone, testing, reporting of rounds."""
MAX_RECENT = 5
MAX_HISTORY = 500
"""Max rounds that are kept for curves."""

E = TypeVar("E", bound=Event)


@dataclass
class RunView:
    """Folds the events of one run, in order, into its current state. It works as a sink and on the events of a log.

    Rounds are counted from 1, episodes from 0: the hosts of round ``n`` play episode ``n - 1``.
    """

    rounds: int = 0
    """Planned number of rounds; 0 if unknown."""
    done: int = 0
    """Number of completed rounds."""
    hosts: dict[int, events.EpochCompleted] = field(default_factory=dict)
    """The newest epoch of each host of the newest round, by env."""
    planted: dict[tuple[int, str], str] = field(default_factory=dict)
    """The blueprint planted last, by env and slot."""
    blueprints: BlueprintAnalytics = field(default_factory=BlueprintAnalytics)
    anomalies: dict[tuple[str, str | None], list[events.AnomalyDetected]] = field(default_factory=dict)
    """Anomalies of learning, by their kind and head."""
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """The newest actions, rollbacks and cut seeds."""
    completed: deque[events.RoundCompleted] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    """The newest rounds."""
    updates: deque[events.PolicyUpdated] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    """The newest updates of the agent."""
    curve_epochs: dict[int, list[float]] = field(default_factory=dict)
    """Of the hosts of the newest round, by epoch: number of hosts, and sums of their accuracy and their baseline."""
    _last: dict[type[Event], Event] = field(default_factory=dict)
    _round_seconds: list[float] = field(default_factory=list)
    _epochs_per_round: int = 0

    def handle(self, event: Event) -> None:
        self._last[type(event)] = event
        self.blueprints.handle(event)
        match event:
            case events.RunStarted() | events.RunResumed():
                self.rounds = event.rounds
                self._epochs_per_round = event.n_envs * event.episode_length
                if isinstance(event, events.RunResumed):
                    self.done = event.round
            case events.EpochCompleted():
                self._add_epoch(event)
            case events.StageChanged(blueprint=str() as blueprint):
                self.planted[event.env, event.slot] = blueprint
            case events.RoundCompleted():
                self.rounds = event.rounds
                self.done = event.round
                self.completed.append(event)
                if math.isfinite(event.seconds):
                    self._round_seconds.append(event.seconds)
            case events.PolicyUpdated():
                self.updates.append(event)
            case events.AnomalyDetected():
                self.anomalies.setdefault((event.kind, event.head), []).append(event)
            case events.ActionTaken() | events.GovernorRollback() | events.SeedCut():
                self.recent.append(event)

    def _add_epoch(self, event: events.EpochCompleted) -> None:
        """Adds an epoch to the round that it is of; the first one of a new round clears the one before."""
        if event.episode != self.episode:
            self.hosts.clear()
            self.curve_epochs.clear()
        self.hosts[event.env] = event
        sums = self.curve_epochs.setdefault(event.epoch, [0.0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += event.validation_accuracy
        sums[2] += event.baseline_accuracy

    @property
    def score(self) -> ScoreUnit:
        """Display format of the score of hosts."""
        defined = self.last(events.ScoreDefined)
        if defined is None:
            return ACCURACY
        return ScoreUnit(defined.name, defined.unit, gap=defined.unit, points=defined.points)

    def last(self, event: type[E]) -> E | None:
        """Returns the newest event of that class."""
        return cast("E | None", self._last.get(event))

    @property
    def own_loop(self) -> bool:
        """True if the host is trained by a loop outside Esper: it has no tier, and unlike simulated hosts it reports
        its epochs."""
        begun = self.last(events.RunStarted) or self.last(events.RunResumed)
        return begun is not None and begun.tier is None and bool(self.hosts)

    @property
    def alone(self) -> str | None:
        """The name of baseline accuracies: those of hosts left alone; None for those of the loop's own model as it is
        without its seeds, which leans on them and says nothing about growth."""
        if self.own_loop and self.last(events.BaselineMeasured) is None:
            return None
        return "baseline"

    @property
    def episode(self) -> int:
        """The episode of ``hosts``; -1 before the first epoch."""
        if not self.hosts:
            return -1
        return next(iter(self.hosts.values())).episode

    @property
    def current(self) -> list[events.EpochCompleted]:
        """The newest epoch of each host, by env, if their round is not completed; otherwise empty."""
        if self.episode < self.done:
            return []
        return [self.hosts[env] for env in sorted(self.hosts)]

    @property
    def part_of_round(self) -> float:
        """The part of the current round that is done, 0 to 1."""
        # Hosts of one round may be at different epochs.
        epochs = sum(epoch.epoch for epoch in self.current)
        return min(1.0, epochs / max(1, self._epochs_per_round))

    @property
    def curve(self) -> list[float]:
        """The mean accuracy of the newest round's hosts by epoch, on validation images."""
        return [accuracy / hosts for _, (hosts, accuracy, _) in sorted(self.curve_epochs.items())]

    @property
    def alone_curve(self) -> list[float]:
        """The mean of their baseline at the same epochs."""
        return [baseline / hosts for _, (hosts, _, baseline) in sorted(self.curve_epochs.items())]

    @property
    def stages(self) -> Counter[str]:
        """The number of slots of the newest round in each stage."""
        counts: Counter[str] = Counter()
        for epoch in self.hosts.values():
            counts.update(epoch.stages.values())
        return counts

    def seconds_left(self) -> float | None:
        """Estimates the seconds until all rounds are played: the mean duration of a round, times the remaining rounds.

        A log has no better clock. Where a run is at work, :class:`~esper.telemetry.workload.Workload` knows more. None
        if no duration is known yet.
        """
        if not self._round_seconds:
            return None
        left = max(0.0, self.rounds - self.done - self.part_of_round)
        return left * sum(self._round_seconds) / len(self._round_seconds)

    def warnings(self) -> list[tuple[int, events.AnomalyDetected]]:
        """Returns how often each anomaly occurred, and its newest event."""
        return [(len(anomalies), anomalies[-1]) for anomalies in self.anomalies.values()]


def phase_seconds(event: events.RoundCompleted) -> dict[str, float]:
    """Returns the seconds of a round by phase, including the rest; the sum is the duration of the round."""
    # A log may hold anything: only durations count.
    phases = {name: seconds for name, seconds in event.phase_seconds.items() if math.isfinite(seconds) and seconds > 0}
    rest = event.seconds - sum(phases.values())
    if math.isfinite(rest) and rest > 0:
        phases[REST] = rest
    return phases
