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
        left = self.total - self.done
        return left if left > ROUNDING * self.total else 0.0

    def pace(self, guess: float) -> float:
        """Returns the seconds per unit: what was measured, mixed with the guess as long as that is little."""
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
        self.started = self._since = clock()

    def add(self, phases: Iterable[Phase]) -> None:
        """Adds work; phases of the same name become one."""
        for phase in () if self.complete else phases:
            if known := self.phases.get(phase.name):
                known.total += phase.total
            elif phase.total > 0:
                self.phases[phase.name] = phase

    def repeat(self, times: int) -> None:
        """Multiplies the work by ``times``: what is added from now on is part of it."""
        for phase in self.phases.values():
            phase.total *= times
        self.complete = True

    def start(self) -> None:
        """Begins to measure: what came before was not work."""
        self.started = self._since = self.clock()

    def pause(self) -> None:
        """Ends time that was not work, such as that of setting up hosts: it says nothing about the pace."""
        self._since = self.clock()

    def advance(self, name: str, units: float) -> None:
        """Counts ``units`` of a phase; they took the time since the last count. Time of no units was not work."""
        if not units:
            self.pause()
            return
        now, phase = self.clock(), self.phases.get(name)
        seconds, self._since = now - self._since, now
        if phase is None:
            return
        phase.done, phase.timed, phase.seconds = phase.done + units, phase.timed + units, phase.seconds + seconds
        self.current = name
        if self.report is not None:
            try:
                self.report(self)
            except Exception as error:  # as with sinks: what observes work never stops it
                self.report = None
                logger.warning("progress is no longer shown: %s: %s", type(error).__name__, error)

    def counter(self, name: str, each: float = 1.0) -> Callable[[int], None]:
        """Returns what counts a number of epochs of hosts, of ``each`` units."""
        return lambda epochs: self.advance(name, each * epochs)

    def settle(self, name: str, until: float) -> None:
        """Counts what is missing to ``until`` units of a phase, because it turned out to be less work."""
        if phase := self.phases.get(name):
            self.advance(name, max(0.0, until - phase.done))

    def skip(self, name: str, units: float) -> None:
        """Notes units that an earlier process has done."""
        if phase := self.phases.get(name):
            phase.done += units

    def done(self, name: str) -> float:
        """Returns the units of a phase that are done."""
        return self.phases[name].done if name in self.phases else 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start in this process."""
        return self.clock() - self.started

    def seconds_left(self) -> float | None:
        """Estimates the seconds that all phases still take; None before anything was planned and measured."""
        left = [self._left(phase) for phase in self.phases.values()]
        return None if None in left or not left else sum(seconds for seconds in left if seconds is not None)

    def by_phase(self) -> dict[str, float]:
        """Returns the estimated seconds that each phase still takes, as far as they are known."""
        known = {name: self._left(phase) for name, phase in self.phases.items()}
        return {name: seconds for name, seconds in known.items() if seconds}

    def _left(self, phase: Phase) -> float | None:
        if not phase.left:
            return 0.0
        guess = phase.guess
        if guess is None:
            hosts = [other for other in self.phases.values() if other.guess is None]
            timed = sum(other.timed for other in hosts)
            guess = sum(other.seconds for other in hosts) / timed if timed else None
        return None if guess is None else phase.left * phase.pace(guess)

    @property
    def part(self) -> float:
        """The part of all work that is done, 0 to 1, by time as far as that can be estimated."""
        left, elapsed = self.seconds_left(), self.elapsed
        return 0.0 if left is None or not left + elapsed else elapsed / (left + elapsed)


def work_of(alone: bool) -> float:
    """Returns the work of one epoch of a host that grows, or is left alone."""
    return 1.0 if alone else GROWN
