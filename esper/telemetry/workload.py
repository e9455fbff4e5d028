"""The work of a run or a comparison: its phases, how far each of them is, and the time that is left for all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

GROWN = 4.0
"""Work of an epoch of a host that grows, in epochs of a host left alone.

On `digits` with all its slots, it took 4.1 times the CPU time of a host of the baseline. A phase is soon estimated by
its own pace.
"""
PRACTICE_SECONDS = 4e-4
"""Seconds of a practice step until it is measured; 3.8e-4 of a CPU were."""
ROUNDING = 1e-9
"""Part of a phase that counts as nothing: sums are rounded."""
TRUST = 0.02
"""Part of a phase after which its own pace counts as much as the guess."""


@dataclass
class Phase:
    """One kind of work. Its units are epochs of a host left alone, or steps of practice."""

    name: str
    total: float
    guess: float | None = None
    """Seconds per unit before any is measured; None: as in the phases that train hosts."""
    done: float = 0.0
    timed: float = 0.0
    """Units done in this process, in ``seconds``."""
    seconds: float = 0.0

    @property
    def left(self) -> float:
        """Units to come."""
        left = self.total - self.done
        return left if left > ROUNDING * self.total else 0.0

    def pace(self, guess: float) -> float:
        """Returns the seconds per unit: what was measured, mixed with the guess as long as that is little."""
        # The guess counts as that many units that were measured.
        trust = TRUST * self.total
        return (guess * trust + self.seconds) / (trust + self.timed)


class Workload:
    """Counts work by phase, and estimates how long the rest takes.

    Args:
        clock: seconds from any starting point.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.phases: dict[str, Phase] = {}
        """By name, in the order in which they are done."""
        self.clock = clock
        self.report: Callable[[Workload], None] | None = None
        """Called with this object whenever work was done; dropped if it raises."""
        self.complete = False
        """Whether :meth:`repeat` was called."""
        self.current: str | None = None
        """Name of the phase that work was last done in."""
        self.started = clock()
        self._since = self.started

    def add(self, phases: Iterable[Phase]) -> None:
        """Adds work; phases of the same name become one."""
        if self.complete:
            return
        for phase in phases:
            known = self.phases.get(phase.name)
            if known is not None:
                known.total += phase.total
            elif phase.total > 0:  # a phase without work is not shown
                self.phases[phase.name] = phase

    def repeat(self, times: int) -> None:
        """Multiplies the work by ``times``: what is added from now on is part of it."""
        for phase in self.phases.values():
            phase.total *= times
        self.complete = True

    def start(self) -> None:
        """Begins to measure: what came before was not work."""
        self.started = self.clock()
        self._since = self.started

    def pause(self) -> None:
        """Ends time that was not work, such as that of setting up hosts: it says nothing about the pace."""
        self._since = self.clock()

    def advance(self, name: str, units: float) -> None:
        """Counts ``units`` of a phase; they took the time since the last count. Time of no units was not work."""
        if not units:
            self.pause()
            return
        # Also for a phase that was not planned, whose time must not count for the next one.
        now = self.clock()
        seconds = now - self._since
        self._since = now
        phase = self.phases.get(name)
        if phase is None:
            return
        phase.done += units
        phase.timed += units
        phase.seconds += seconds
        self.current = name
        if self.report is not None:
            try:
                self.report(self)
            except Exception as error:  # as with sinks: what observes work never stops it
                self.report = None
                logger.warning("progress is no longer shown: %s: %s", type(error).__name__, error)

    def counter(self, name: str, an_epoch: float = 1.0) -> Callable[[int], None]:
        """Returns a function that counts epochs of hosts, each of ``an_epoch`` units."""
        return lambda epochs: self.advance(name, an_epoch * epochs)

    def settle(self, name: str, until: float) -> None:
        """Counts the units of a phase that are missing to ``until``, because it turned out to be less work."""
        phase = self.phases.get(name)
        if phase is not None:
            self.advance(name, max(0.0, until - phase.done))

    def skip(self, name: str, units: float) -> None:
        """Notes units that an earlier process has done."""
        phase = self.phases.get(name)
        if phase is not None:
            phase.done += units

    def done(self, name: str) -> float:
        """Returns the units of a phase that are done."""
        phase = self.phases.get(name)
        return 0.0 if phase is None else phase.done

    @property
    def elapsed(self) -> float:
        """Seconds since the start in this process."""
        return self.clock() - self.started

    def seconds_left(self) -> float | None:
        """Estimates the seconds that all phases still take; None before anything was planned and measured."""
        known = [seconds for seconds in map(self._left, self.phases.values()) if seconds is not None]
        # A phase of unknown length makes the whole unknown.
        if not known or len(known) < len(self.phases):
            return None
        return sum(known)

    def by_phase(self) -> dict[str, float]:
        """Returns the estimated seconds that each phase still takes, as far as they are known."""
        known = {}
        for name, phase in self.phases.items():
            seconds = self._left(phase)
            if seconds:
                known[name] = seconds
        return known

    def _left(self, phase: Phase) -> float | None:
        """Estimates the seconds that a phase still takes; None if nothing like it was measured."""
        if not phase.left:
            return 0.0
        guess = self._pace_of_hosts() if phase.guess is None else phase.guess
        if guess is None:
            return None
        return phase.left * phase.pace(guess)

    def _pace_of_hosts(self) -> float | None:
        """Returns the seconds per unit in all phases that train hosts; None before any was measured."""
        hosts = [phase for phase in self.phases.values() if phase.guess is None]
        timed = sum(phase.timed for phase in hosts)
        if not timed:
            return None
        return sum(phase.seconds for phase in hosts) / timed

    @property
    def part(self) -> float:
        """The part of all work that is done, 0 to 1, by time as far as that can be estimated."""
        left = self.seconds_left()
        elapsed = self.elapsed
        if left is None or not left + elapsed:
            return 0.0
        return elapsed / (left + elapsed)


def work_of(alone: bool) -> float:
    """Returns the work of one epoch of a host that grows, or is left alone."""
    return 1.0 if alone else GROWN
