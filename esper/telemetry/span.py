"""Spans: the wall seconds of each phase of a run, and the same phases by name in the traces of profilers.

A leaf: whatever takes part in a step may import it. A run's spans are those of its env; there are no global ones.
"""

from __future__ import annotations

from contextlib import ExitStack
from threading import get_ident
from time import perf_counter
from types import TracebackType

import torch

PHASES = {
    "act": "the controller chooses",
    "stage": "waiting for batches of data that is not in memory",
    "train": "an epoch of every host; on a GPU, until the slowest device has done it",
    "validate": "every configuration of every host, and the transfer of what was measured",
    "govern": "snapshots, rollbacks and the removal of broken seeds",
    "decide": "actions applied to slots, clocks, gates, rewards, observations and masks",
    "update": "the agent learns",
    "telemetry": "events made, and handled by all sinks",
}
"""The phases of a round and what is timed in each, in the order of their columns in the metrics."""


class Spans:
    """Where the time goes: ``with spans("train"): ...`` adds the block's wall seconds to ``spans.seconds["train"]``.

    Spans nest. The time of an inner one is its own and is not in the outer one too, so the sum over all phases is wall
    time that was spent once. A block that raises is counted like any other.

    One thread uses an object of this class at a time; lanes use none, because what they do side by side is one phase.

    Args:
        marks: see the attribute.
    """

    def __init__(self, marks: bool = False) -> None:
        self.marks = marks
        """Whether spans are also ranges ``esper/train``, ... of ``torch.profiler`` and, where torch has CUDA, of NVTX.
        Set it while something is profiled: torch has no public way to ask for that, and a range that nobody records
        costs several times as much as the span."""
        self.seconds: dict[str, float] = {}
        """Wall seconds of each phase that was entered so far; those of a span that is still open are not all in it."""
        self._spans = {name: Span(self, name) for name in PHASES}
        self._open: list[tuple[str, ExitStack | None]] = []
        self._since = 0.0
        self._thread = 0

    def __call__(self, name: str) -> Span:
        """The span of a phase, to be entered. Raises ValueError for a name that is not in ``PHASES``."""
        span = self._spans.get(name)
        if span is None:
            raise ValueError(f"unknown phase {name!r}; known: {', '.join(PHASES)}")
        return span

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move wall seconds that were counted in phase ``source`` to phase ``target``: a wait for work of the other
        phase. The sum over all phases stays.

        Raises ValueError for a name that is not in ``PHASES``, and for seconds that are negative or more than
        ``source`` has.
        """
        for name in (source, target):
            self(name)
        if not 0 <= seconds <= self.seconds.get(source, 0.0):
            has = self.seconds.get(source, 0.0)
            raise ValueError(f"cannot move {seconds} s from {source} to {target}: {source} has {has} s")
        if seconds:
            self.seconds[source] -= seconds
            self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def _begin(self, name: str) -> None:
        thread = get_ident()
        if self._open and thread != self._thread:
            raise RuntimeError(f"phase {name} began in a different thread than the open phase {self._open[-1][0]}")
        self._thread = thread
        # Opened before the clock is read: what marking costs is the outer phase's.
        marks = _ranges(f"esper/{name}") if self.marks else None
        now = perf_counter()
        self._count(now)
        self._open.append((name, marks))

    def _end(self) -> None:
        self._count(perf_counter())
        _, marks = self._open.pop()
        if marks is not None:
            marks.close()

    def _count(self, now: float) -> None:
        """Give the time since the last change of phase to the innermost open one."""
        if self._open:
            name = self._open[-1][0]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


class Span:
    """One phase of one :class:`Spans`; a context manager that can be entered again, also within itself."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Spans, name: str) -> None:
        self._owner, self._name = owner, name

    def __enter__(self) -> None:
        self._owner._begin(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner._end()


def _ranges(name: str) -> ExitStack:
    """Open ranges of that name; closing the stack ends them."""
    ranges = ExitStack()
    ranges.enter_context(torch.profiler.record_function(name))
    if torch.version.cuda is not None:  # a torch without it has no NVTX
        ranges.enter_context(torch.cuda.nvtx.range(name))
    return ranges
