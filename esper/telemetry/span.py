"""Spans: wall seconds of each phase of a run, and the same phases as ranges in the traces of profilers.

Every module that takes part in a step may import this one. A run's spans are those of its env; none are global.
"""

from __future__ import annotations

from contextlib import ExitStack
from threading import get_ident
from time import perf_counter

PHASES = {
    "act": "the controller chooses actions",
    "stage": "waiting for batches of data that is not in memory",
    "train": "training an epoch of every host; on a GPU, until the slowest device is done",
    "validate": "validating every configuration of every host, and transferring the results",
    "govern": "snapshots, rollbacks and the removal of non-finite seeds",
    "decide": "applying actions; clocks, gates, rewards, observations and masks",
    "update": "the agent learns",
    "telemetry": "making events, and handling them in all sinks",
}
"""The phases of a round and their contents, in the order of their columns in the metrics."""


class Spans:
    """Counts time by phase: ``with spans("train"): ...`` adds the block's wall seconds to ``spans.seconds["train"]``.

    Spans nest. The time of an inner span is not counted in the outer one, so the sum over all phases is the wall time.
    A block that raises is counted like any other.

    One thread uses an object of this class at a time; workers use none, because their parallel work is one phase.

    Args:
        marks: see the attribute.
    """

    def __init__(self, marks: bool = False) -> None:
        self.marks = marks
        """Whether spans are also ranges ``esper/train``, ... of ``torch.profiler`` and, if torch has CUDA, of NVTX. Set
        it while profiling: torch has no public way to query that, and a range costs several times as much as a span,
        recorded or not."""
        self.seconds: dict[str, float] = {}
        """Wall seconds of each phase entered so far; an open span is counted only in part."""
        self._spans = {name: Span(self, name) for name in PHASES}
        self._open: list[tuple[str, ExitStack | None]] = []
        self._since = 0.0
        self._thread = 0

    def __call__(self, name: str) -> Span:
        """Returns the span of a phase, to be entered. Raises ValueError for a name that is not in ``PHASES``."""
        span = self._spans.get(name)
        if span is None:
            raise ValueError(f"unknown phase {name!r}; known: {', '.join(PHASES)}")
        return span

    def move(self, source: str, target: str, seconds: float) -> None:
        """Moves wall seconds from phase ``source`` to phase ``target``, for a wait for work of another phase.

        Raises:
            ValueError: a name is not in ``PHASES``, or ``seconds`` is negative or more than ``source`` has.
        """
        for name in (source, target):
            self(name)
        has = self.seconds.get(source, 0.0)
        if not 0 <= seconds <= has:
            raise ValueError(f"cannot move {seconds} s from {source} to {target}: {source} has {has} s")
        if seconds:
            self.seconds[source] -= seconds
            self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def _begin(self, name: str) -> None:
        thread = get_ident()
        if self._open and thread != self._thread:
            raise RuntimeError(f"phase {name} began in a different thread than the open phase {self._open[-1][0]}")
        self._thread = thread
        # Opened before the clock is read, so that the outer phase pays for the ranges.
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
        """Adds the time since the last change of phase to the innermost open one."""
        if self._open:
            name = self._open[-1][0]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


class Span:
    """One phase of one :class:`Spans`; a context manager that can be entered again, also within itself."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Spans, name: str) -> None:
        self._owner = owner
        self._name = name

    def __enter__(self) -> None:
        self._owner._begin(self._name)

    def __exit__(self, *error: object) -> None:
        self._owner._end()


def _ranges(name: str) -> ExitStack:
    """Opens ranges of that name; closing the stack ends them."""
    import torch  # slow to import, and the names of phases are also read without it

    ranges = ExitStack()
    ranges.enter_context(torch.profiler.record_function(name))
    if torch.version.cuda is not None:  # builds without CUDA have no NVTX
        ranges.enter_context(torch.cuda.nvtx.range(name))
    return ranges
